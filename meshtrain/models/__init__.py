"""Models: a task is an init and a loss over arrays with logical axes; the built-in tasks are Flax modules.

`task.py` defines the contract `Task`, with the shapes of batches; `metrics.py` defines kinds of metrics. The decoder
has a file of options, a file of modules and a file that builds the task. Attention and experts have implementations for
each platform and a function that selects one. Embedding, head and loss may be split over the vocabulary. Low-rank
adapters are added to matrices. This package uses neither the mesh nor the configuration directly.
"""
