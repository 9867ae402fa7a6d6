"""Models: a task is an init and a loss over arrays with logical axes; the built-in tasks are Flax modules.

`task.py` defines the contract `Task`, which states the shapes of batches; `metrics.py` defines the kinds of metrics.
The decoder's options, its modules and its task are in separate files. Attention and experts have implementations for
each platform, and a function that selects an implementation. Embedding, head and loss may be split over the vocabulary.
Low-rank adapters are added to matrices. This package uses neither the mesh nor the configuration directly.
"""
