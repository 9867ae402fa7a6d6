"""Plans a training step: compiles it for a cluster that need not exist, and analyses the compiled program.

A cluster is a description for the compiler. The compiled text is parsed without JAX: collectives and their axes, FLOPs,
bytes. The plan adds lower bounds of the bytes to send, memory from shardings, and a model of the step's time. A search
estimates many configurations, compiles the best estimates and ranks them.
"""
