"""What do we see? Metrics, trackers, the terminal, and the profiler's traces."""
