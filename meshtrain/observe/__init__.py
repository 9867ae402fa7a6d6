"""WHAT DO WE SEE? Metrics, trackers, the terminal, and the profiler's traces."""
