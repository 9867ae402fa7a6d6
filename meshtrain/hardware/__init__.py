"""Properties of machines: published peaks of accelerators, measured links, and options of XLA's compiler.

The package contains only tables and files, and does not import JAX. Accelerators have peak rates and memory by device
kind. Measured links have a latency and a bandwidth for each collective and mesh axis. The compiler's options depend on
the device kind.
"""
