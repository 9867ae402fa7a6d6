"""What do the machines offer? Published peaks of accelerators, measured links, and options of XLA's compiler.

Tables and files only, without JAX. The accelerators have peak rates and memory by device kind; measured links have a
latency and a bandwidth for each collective and mesh axis; the compiler's options follow from the device kind.
"""
