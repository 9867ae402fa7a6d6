"""Scaling: strategies, numbers of devices, and the efficiency of each."""
