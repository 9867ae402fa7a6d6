"""What would a run need? The step, compiled for a cluster that need not exist, and its program analysed.

A cluster is a description for the compiler. The compiled text is parsed without JAX: collectives and their axes,
work, bytes. Beside it stand lower bounds of what has to be sent, memory by arithmetic, and a model of time. A search
guesses, compiles the best guesses and ranks them; a scaling does so on many numbers of devices.
"""
