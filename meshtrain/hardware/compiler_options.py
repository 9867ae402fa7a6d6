"""XLA as a compiler: its options for the step and the initial weights, and what its C++ code writes meanwhile."""

import contextlib
import dataclasses
import importlib.metadata
import os
import re
import sys
import threading
from collections.abc import Iterator
from typing import TypeAlias

from meshtrain.errors import terminals

# The line with which a compiler announces that it aborts the process: it has to reach the terminal before that.
FATAL = re.compile(r"[FE]\d{4} .*Check fail|F\d{4} ")

CACHE = "~/.cache/meshtrain/jax"  # of compiled programs, where JAX_COMPILATION_CACHE_DIR names no other folder

XlaValue: TypeAlias = bool | int | float | str  # of an option of the compiler
CompilerOptions: TypeAlias = dict[str, XlaValue]  # name, as XLA knows it -> value


@dataclasses.dataclass(frozen=True)
class CompilerOption:
    """One option that every step is compiled with on one kind of device.

    Attributes:
      name: as XLA knows it.
      value: a bool or a number, which XLA refuses as text; or the name of an enum's value.
      reason: its purpose, in one line.
      before: the first jaxlib version without this option (removed, crashing, or untested); "999" for none.
      since: the first jaxlib version with it; "0" for all.
    """

    name: str
    value: XlaValue
    reason: str
    before: str = "999"
    since: str = "0"


PIPELINED = {
    "all_gather": "gathers the next layer's weights early",
    "reduce_scatter": "scatters gradients during the next layer",
    "all_reduce": "sums gradients during the next layer",
}
PIPELINED_GATHERS = ("xla_gpu_enable_pipelined_all_gather", "xla_gpu_pipeline_all_gather")

# On jaxlib 0.10.2 matrix products overlap at least 90 % of FSDP's traffic with these. jaxlib 0.12.0 has other names for
# the pipelined ones (see LARGE_GPU_OPTIONS), and its compiler aborts with the estimator.
GPU_OPTIONS = (
    CompilerOption(
        "xla_gpu_enable_latency_hiding_scheduler", True, "starts collectives early; some GPUs (A100) do not by default"
    ),
    CompilerOption(
        "xla_gpu_enable_analytical_latency_estimator",
        True,
        "weighs collectives by size; older GPUs guess by default",
        "0.11",
    ),
    *(CompilerOption(f"xla_gpu_enable_pipelined_{kind}", True, why, before="0.11") for kind, why in PIPELINED.items()),
)


# With layers whose gradients are larger than LARGE_BYTES on a device. jaxlib 0.12 copies what pipelined loops carry,
# which costs smaller layers more than it hides (modelled).
LARGE_BYTES = 128 * 2**20
LARGE_GPU_OPTIONS = tuple(
    CompilerOption(f"xla_gpu_pipeline_{kind}", "COLLECTIVE_PIPELINING_MODE_ON", why, since="0.12")
    for kind, why in PIPELINED.items()
)


# With experts on several devices, whose tokens cross the links between the gathers of weights; LARGE_GPU_OPTIONS come
# with it. On jaxlib 0.12 `qwen3_235b_a22b` takes 13 % less with the first and 12 % less with the second, `mixtral_8x7b`
# 8 % and `qwen3_30b_a3b` 7 % less with the second. On 0.10 that one makes all three slower (modelled).
EXPERT_GPU_OPTIONS = (
    CompilerOption(
        "xla_gpu_enable_analytical_sol_latency_estimator",
        False,
        "starts gathers of weights early although tokens are exchanged meanwhile",
        since="0.12",
    ),
    CompilerOption(
        "xla_gpu_experimental_parallel_collective_overlap_limit",
        64,
        "weights are gathered and gradients scattered while tokens are exchanged",
        since="0.12",
    ),
)


# With gradients that are applied one step late.
LATE_GPU_OPTIONS = (
    CompilerOption(
        "xla_gpu_experimental_parallel_collective_overlap_limit",
        64,
        "late gradients are reduced beside the whole step; of one collective at a time all but one wait for its end",
    ),
)


# With gradients that a pipeline reduces beside loops over rows, or with experts in its layers, whose collectives follow
# one another closely (modelled). Those of gradients are not joined: XLA's scheduler then ends them before the loop.
CHUNK_GPU_OPTIONS = (
    CompilerOption(
        "xla_gpu_experimental_parallel_collective_overlap_limit",
        64,
        "gradients are reduced beside loops over rows; the limit counts all collectives of a loop",
    ),
    CompilerOption(
        "xla_gpu_memory_limit_slop_factor",
        200,
        "reductions of chunks run beside rows although the scheduler estimates more memory than the step takes",
    ),
)


# With `precision.deterministic`.
DETERMINISTIC_GPU_OPTIONS = (
    CompilerOption(
        "xla_gpu_deterministic_ops",
        True,
        "the same bits each time: rows that are added up are sorted first, and no kernel is chosen by its time",
    ),
    # jaxlib 0.12 does not compile Triton's for a GPU that is not there with the first option.
    CompilerOption(
        "xla_gpu_enable_triton_gemm", False, "products are cuBLAS', by its own choice of kernel", since="0.12"
    ),
)


CPU_OPTIONS = (
    CompilerOption(
        "xla_cpu_copy_insertion_use_region_analysis",
        True,
        "updates moments in place, which it copies by default",
        "0.13",  # not tried yet; an option that XLA does not know makes every compilation fail
    ),
)


# XLA on GPUs joins collectives of the same kind up to this size by default.
JOINED_BYTES = 30 * 2**20


def joining(layer_bytes: int) -> tuple[CompilerOption, ...]:
    """Returns the options that join the reductions of one layer's gradients into one, for GPUs.

    One collective runs at a time, and XLA's scheduler puts products beside the first of several only.

    Args:
      layer_bytes: of one layer's gradients on a device, as they are sent; 0: no loop reduces gradients.
    """
    if layer_bytes <= JOINED_BYTES:
        return ()
    reason = "joins what a layer's gradients send: products run beside one collective, not beside each of several"
    kinds = ("all_reduce", "reduce_scatter")
    return tuple(CompilerOption(f"xla_gpu_{kind}_combine_threshold_bytes", layer_bytes, reason) for kind in kinds)


def options_of(
    device_kind: str,
    layer_bytes: int = 0,
    *,
    is_late: bool = False,
    by_chunk: bool = False,
    gathers_early: bool = True,
    splits_experts: bool = False,
    is_deterministic: bool = False,
) -> tuple[CompilerOption, ...]:
    """Returns the options for `jax.Device.device_kind`; none for TPUs, whose compiler's defaults suffice.

    Args:
      device_kind: as JAX names it.
      layer_bytes: see `joining`.
      is_late: whether gradients are applied one step late.
      by_chunk: whether a pipeline reduces the gradients of each chunk of layers as soon as they are complete, or has
        experts in its layers.
      gathers_early: whether a loop over layers may gather for the next layer, see `Assembly.gathers_early`.
      splits_experts: whether loops over layers, outside of a pipeline, exchange tokens between experts.
      is_deterministic: whether the same program has to give the same bits each time.
    """
    table: tuple[CompilerOption, ...] = CPU_OPTIONS if device_kind == "cpu" else ()
    if device_kind.startswith("NVIDIA"):
        table = GPU_OPTIONS + joining(layer_bytes) + (LATE_GPU_OPTIONS if is_late else ())
        table += CHUNK_GPU_OPTIONS if by_chunk else ()
        table += EXPERT_GPU_OPTIONS if splits_experts else ()
        table += LARGE_GPU_OPTIONS if splits_experts or layer_bytes > LARGE_BYTES else ()
        table += DETERMINISTIC_GPU_OPTIONS if is_deterministic else ()
    table = table if gathers_early else tuple(option for option in table if option.name not in PIPELINED_GATHERS)
    installed = _numbers(importlib.metadata.version("jaxlib"))
    return tuple(one for one in table if _numbers(one.since) <= installed < _numbers(one.before))


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2])


def init_compiler_options(device_kind: str) -> CompilerOptions:
    """Returns the compiler options for the program that makes the initial weights, which runs once.

    On CPUs LLVM's first level of optimization takes half of the compile time; speed and results are the same.
    """
    return {"xla_backend_optimization_level": 1} if device_kind == "cpu" else {}


@contextlib.contextmanager
def captured() -> Iterator[list[str]]:
    """Captures what C++ code writes to file descriptor 2 during the block; yields its lines, there once it has ended.

    A line that matches FATAL, and every line after it, is also written to the terminal at once.
    """
    lines: list[str] = []
    sys.stderr.flush()
    kept = os.dup(2)
    terminals.append(kept)
    reading, writing = os.pipe()
    os.dup2(writing, 2)
    os.close(writing)
    reader = threading.Thread(target=_read, args=(reading, kept, lines), daemon=True)
    reader.start()
    try:
        yield lines
    finally:
        sys.stderr.flush()
        os.dup2(kept, 2)  # closes the last end for writing, so that the reader sees the end of the file
        reader.join()
        terminals.remove(kept)
        os.close(kept)


def _read(reading: int, kept: int, lines: list[str]) -> None:
    is_fatal = False
    with os.fdopen(reading, errors="replace") as stream:
        for line in stream:
            lines.append(line.rstrip("\n"))
            is_fatal = is_fatal or bool(FATAL.match(line))
            if is_fatal:
                os.write(kept, line.encode())
