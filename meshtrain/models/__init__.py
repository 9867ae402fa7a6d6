"""What is computed? A task is an init and a loss over named dims; the built-in ones are Flax modules.

The contract is `Task`, with the shapes of batches, kinds of metrics and the cache of generation beside it. The
decoder is a file of options, one of modules and one that makes the task; attention and experts have implementations
for each platform and a choice between them. Embedding, head and loss may be split over the vocabulary. Low-rank
adapters stand beside the matrices. Nothing here sees a mesh or a configuration.
"""
