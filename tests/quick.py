"""Compiling in less time where only the program counts, or numbers to a relative bound: LLVM optimizes nothing.

At this level one source gives other last bits in other programs. Where those are compared bit by bit, `exact` makes
them; tests ask for the fixture `exact_bits`. Sizes of buffers and collectives are decided before LLVM sees the program,
and are those of any level.
"""

import contextlib
import importlib.metadata
import os
from collections.abc import Iterator

import jax

VARIABLE = "JAX_DISABLE_MOST_OPTIMIZATIONS"
NUM_FRAMES = 100  # at most, of the traceback of an operation: more than any has
QUICK = {"xla_backend_optimization_level": 0}  # for what takes compiler options


def xla_flags() -> list[str]:
    """Returns the flags for `XLA_FLAGS`, which hold wherever most optimizations are not disabled."""
    flags = ["--xla_backend_optimization_level=1"]
    if tuple(map(int, importlib.metadata.version("jaxlib").split(".")[:2])) < (0, 11):
        # Newer ones do not know the first. These emitters take half of the time of compiling; cutting the program into
        # parts that several threads make takes a tenth, and two workers have no threads to spare.
        flags += ["--xla_cpu_use_fusion_emitters=false", "--xla_cpu_parallel_codegen_split_count=1"]
    return flags


def compile_quickly(quickly: bool) -> None:
    """Says how this process compiles from now on, and the programs that it starts."""
    os.environ[VARIABLE] = str(int(quickly))
    jax.config.update(VARIABLE.lower(), quickly)


@contextlib.contextmanager
def exact() -> Iterator[None]:
    """Compiles so that bits of several programs can be compared."""
    before = jax.config.read(VARIABLE.lower())
    compile_quickly(False)
    try:
        yield
    finally:
        compile_quickly(before)


@contextlib.contextmanager
def with_places() -> Iterator[None]:
    """Traces and compiles so that each instruction of a program names its place in the source, as for users."""
    names = ("jax_traceback_in_locations_limit", "jax_compilation_cache_include_metadata_in_key")
    before = {name: getattr(jax.config, name) for name in names}
    jax.config.update(names[0], NUM_FRAMES)
    jax.config.update(names[1], True)  # otherwise the cache may answer with a program that has no places
    try:
        yield
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
