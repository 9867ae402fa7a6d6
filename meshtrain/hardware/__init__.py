"""Properties of machines: published peaks of accelerators, measured links, and options of XLA's compiler.

The package does not import JAX. Accelerators have peak rates and memory by device kind. Measured links are read from a
file, and have a latency and a bandwidth for each collective and mesh axis. The compiler's options depend on the device
kind.
"""
