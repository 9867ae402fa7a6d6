"""Plans how a configuration scales: the compared strategies, the numbers of devices, and the efficiency of each."""
