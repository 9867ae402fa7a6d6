"""How does it scale? Strategies, numbers of devices, and the efficiency of each."""
