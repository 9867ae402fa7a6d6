"""What can be observed? Metrics, trackers, progress on the terminal, the profiler, goodput, and HTML pages.

Times are measured under asynchronous dispatch. Rows of metrics go to a file and to trackers. Several processes
compare what each measures alone, so that a slow one is named. Pages and charts are files that need no network.
"""
