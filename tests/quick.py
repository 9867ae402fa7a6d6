"""Compiling in less time where only the program counts, or numbers to a relative bound: LLVM optimizes nothing.

At this level one source gives other last bits in other programs, so that nothing may be compared bit by bit. Sizes of
buffers and collectives are decided before LLVM sees the program, and are those of any level.
"""

QUICK = {"xla_backend_optimization_level": 0}
