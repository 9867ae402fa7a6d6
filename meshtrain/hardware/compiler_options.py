"""Options of XLA's compiler for the training step and the initial weights; captures the output of XLA's C++ code."""

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

# The line that a compiler writes before it aborts the process; the line must reach the terminal before the abort.
FATAL = re.compile(r"[FE]\d{4} .*Check fail|F\d{4} ")

CACHE = "~/.cache/meshtrain/jax"  # compiled programs, if JAX_COMPILATION_CACHE_DIR is not set

XlaValue: TypeAlias = bool | int | float | str  # the value of a compiler option
CompilerOptions: TypeAlias = dict[str, XlaValue]  # XLA's name -> value


@dataclasses.dataclass(frozen=True)
class CompilerOption:
    """A compiler option for every step on one kind of device.

    Attributes:
      name: XLA's name of the option.
      value: a bool or a number, which XLA rejects as text; or the name of an enum's value.
      reason: the purpose of the option, in one line.
    """

    name: str
    value: XlaValue
    reason: str


# The tables below are for jaxlib 0.12. Older versions, the last of which is 0.10.2 for Python 3.11, can train too, but
# lack the options of LARGE_GPU_OPTIONS and EXPERT_GPU_OPTIONS. XLA rejects options that it does not know.
GPU_OPTIONS = (
    CompilerOption(
        "xla_gpu_enable_latency_hiding_scheduler",
        True,
        "starts collectives early; by default, some GPUs (A100) start them late",
    ),
)


# For layers whose gradients are larger than LARGE_BYTES on a device. XLA copies the carry of pipelined loops; for
# smaller layers these copies take more time than the pipelining hides (modelled).
LARGE_BYTES = 128 * 2**20
PIPELINED_GATHERS = "xla_gpu_pipeline_all_gather"
PIPELINED = {
    PIPELINED_GATHERS: "gathers the next layer's weights early",
    "xla_gpu_pipeline_reduce_scatter": "scatters gradients during the next layer",
    "xla_gpu_pipeline_all_reduce": "sums gradients during the next layer",
}
LARGE_GPU_OPTIONS = tuple(
    CompilerOption(name, "COLLECTIVE_PIPELINING_MODE_ON", reason) for name, reason in PIPELINED.items()
)


# For experts on several devices, which exchange tokens between the all-gathers of weights; used together with
# LARGE_GPU_OPTIONS. `qwen3_235b_a22b` takes 13 % less time with the first and 12 % less with the second option,
# `mixtral_8x7b` 8 % and `qwen3_30b_a3b` 7 % less with the second (modelled).
EXPERT_GPU_OPTIONS = (
    CompilerOption(
        "xla_gpu_enable_analytical_sol_latency_estimator",
        False,
        "starts gathers of weights early, even during an exchange of tokens",
    ),
    CompilerOption(
        "xla_gpu_experimental_parallel_collective_overlap_limit",
        64,
        "gathers weights and scatters gradients while tokens are exchanged",
    ),
)


# For gradients that are applied one step late.
LATE_GPU_OPTIONS = (
    CompilerOption(
        "xla_gpu_experimental_parallel_collective_overlap_limit",
        64,
        "reduces the delayed gradients during the next step; with only one collective at a time, the others would wait",
    ),
)


# For a pipeline that overlaps the reduction of gradients with loops over clock ticks, or that has experts, whose
# collectives follow each other closely (modelled). Reductions of gradients are not joined: XLA's scheduler would then
# complete them before the loop.
CHUNK_GPU_OPTIONS = (
    CompilerOption(
        "xla_gpu_experimental_parallel_collective_overlap_limit",
        64,
        "reduces gradients during loops over clock ticks; the limit counts all collectives of a loop",
    ),
    CompilerOption(
        "xla_gpu_memory_limit_slop_factor",
        200,
        "lets reductions of chunks overlap clock ticks although the scheduler overestimates the memory of the step",
    ),
)


# For `precision.deterministic`.
DETERMINISTIC_GPU_OPTIONS = (
    CompilerOption(
        "xla_gpu_deterministic_ops",
        True,
        "deterministic: sorts rows before it adds them, and does not choose kernels by their measured time",
    ),
    # With the first option, XLA cannot compile Triton products for a GPU that is not present.
    CompilerOption("xla_gpu_enable_triton_gemm", False, "computes products with cuBLAS, which selects the kernels"),
)


# Up to jaxlib 0.12. In later versions the option is untested.
CPU_OPTIONS = (
    CompilerOption(
        "xla_cpu_copy_insertion_use_region_analysis", True, "updates moments in place; by default, they are copied"
    ),
)


# XLA on GPUs joins collectives of the same kind up to this size by default.
JOINED_BYTES = 30 * 2**20


def joining(layer_bytes: int) -> tuple[CompilerOption, ...]:
    """Returns the options that join the reductions of one layer's gradients into a single collective, for GPUs.

    Only one collective runs at a time, and XLA's scheduler overlaps products only with the first of several
    collectives.

    Args:
      layer_bytes: the size of one layer's gradients on a device in the dtype in which they are sent; 0 if no loop
        reduces gradients.
    """
    if layer_bytes <= JOINED_BYTES:
        return ()
    reason = "combines the transfers of a layer's gradients into one collective, which products can overlap"
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
    """Returns the options with which XLA compiles the training step for a kind of device.

    The result is empty for TPUs, for which XLA's defaults are sufficient. Options that the installed jaxlib lacks are
    left out.

    Args:
      device_kind: JAX's name of the device, `jax.Device.device_kind`.
      layer_bytes: the size of one layer's gradients on a device in the dtype in which they are sent; 0 if no loop
        reduces gradients.
      is_late: whether gradients are applied one step late.
      by_chunk: whether to add `CHUNK_GPU_OPTIONS`, with which many collectives of a pipeline may run at the same time.
        They help a pipeline that reduces the gradients of each chunk of layers during later clock ticks. They also help
        a pipeline with experts on several devices, because its collectives follow each other closely.
      gathers_early: whether a loop over layers may gather the weights of the next layer early
        (`Assembly.gathers_early`).
      splits_experts: whether experts are on several devices, which exchange tokens in each layer, and there is no
        pipeline.
      is_deterministic: whether repeated runs of a program must give bitwise equal results.
    """
    jaxlib = tuple(int(part) for part in importlib.metadata.version("jaxlib").split(".")[:2])
    if device_kind == "cpu":
        return CPU_OPTIONS if jaxlib < (0, 13) else ()
    if not device_kind.startswith("NVIDIA"):
        return ()
    table = GPU_OPTIONS + joining(layer_bytes) + (LATE_GPU_OPTIONS if is_late else ())
    table += CHUNK_GPU_OPTIONS if by_chunk else ()
    table += DETERMINISTIC_GPU_OPTIONS if is_deterministic else ()
    if jaxlib >= (0, 12):
        table += EXPERT_GPU_OPTIONS if splits_experts else ()
        table += LARGE_GPU_OPTIONS if splits_experts or layer_bytes > LARGE_BYTES else ()
    return tuple(option for option in table if gathers_early or option.name != PIPELINED_GATHERS)


def init_compiler_options(device_kind: str) -> CompilerOptions:
    """Returns the compiler options for the program that initializes the weights, which runs once.

    On CPUs, LLVM's first level of optimization halves the compile time; speed and results are the same.
    """
    return {"xla_backend_optimization_level": 1} if device_kind == "cpu" else {}


@contextlib.contextmanager
def capture_stderr() -> Iterator[list[str]]:
    """Context manager that captures the lines that C++ code writes to file descriptor 2; yields the list of the lines.

    If a line matches `FATAL`, the process is about to abort. This line and every later line are also written to the
    terminal immediately.
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
        os.dup2(kept, 2)  # closes the last writing end, so that the reader reaches the end of the file
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
