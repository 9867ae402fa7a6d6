"""Observation of runs: metrics, trackers, progress on the terminal, the profiler, goodput, and HTML pages.

Step times are measured under asynchronous dispatch. Rows of metrics are written to a file and to trackers. Processes
compare their local measurements, so that a slow process is named. Pages and charts are files that need no network.
"""
