"""Plans a training step: compiles it for a cluster that need not exist, and analyses the compiled program.

The compiler gets a description of the cluster's devices instead of the devices. The text of the compiled program is
parsed without JAX into collectives with their mesh axes, FLOPs and bytes. A plan adds lower bounds of the bytes to
send, memory computed from shardings, and a modelled step time. A search estimates many configurations, compiles those
with the best estimates, and ranks them.
"""
