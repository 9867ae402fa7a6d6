"""Compiling in less time where only the program counts, or numbers to a relative bound: LLVM optimizes nothing.

At this level one source gives other last bits in other programs, so that nothing may be compared bit by bit. Sizes of
buffers and collectives are decided before LLVM sees the program, and are those of any level.
"""

import contextlib
from collections.abc import Iterator

from meshtrain import assemble

QUICK = {"xla_backend_optimization_level": 0}


@contextlib.contextmanager
def quick_steps() -> Iterator[None]:
    """Compiles steps in less time; what is compared bit by bit has to be made by one program."""
    original = assemble.compiler_options
    assemble.compiler_options = lambda device_kind: original(device_kind) | QUICK
    try:
        yield
    finally:
        assemble.compiler_options = original
