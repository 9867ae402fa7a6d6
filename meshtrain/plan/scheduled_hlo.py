"""Plans a GPU's step from the program that XLA dumps after scheduling, because a plan needs no compiled kernels.

XLA has no option to stop after scheduling. So another process compiles, and ends as soon as the dump, an `HloProto`, is
complete. The field numbers below are defined in xla/service/hlo.proto.
"""

import collections
import contextlib
import functools
import multiprocessing
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeAlias

import jax
from google.protobuf.empty_pb2 import Empty
from google.protobuf.message import DecodeError
from google.protobuf.unknown_fields import UnknownFieldSet
from jax._src import xla_bridge
from jaxlib._hlo import HloModule

from meshtrain.assembly.assemble import assemble
from meshtrain.config import extensions
from meshtrain.config.schema import Config
from meshtrain.hardware.compiler_options import CompilerOptions
from meshtrain.plan.cluster.attention_tracing import as_on_target
from meshtrain.plan.cluster.clusters import GPUS, Cluster, open_cluster, parse
from meshtrain.plan.cluster.compile import Compiled, Compiler, compile_step
from meshtrain.plan.planner import shape_on

COMPARED = "0.12.0.1"  # the jax version whose plans from dumps `scripts/bench plan_ratio` has confirmed
POLL_SECONDS = 0.05
OF_THREAD, PARAMETER, OUTPUT, MEMORY, CONSTANT = 3, 5, 7, 8, 12  # field numbers of a BufferAllocationProto
Pickled: TypeAlias = Any  # a value sent between processes
Datum: TypeAlias = Any  # value of a message's field: an int, or the bytes of a text or message
Work = Callable[..., Pickled]  # a function that a separate process runs
FREE, SHARE = 1, 2  # kinds of a HeapSimulatorTrace.Event; 0 allocates


def start_compiling(config: Config, name: str) -> Callable[[Config, Mapping[str, int], Cluster], Compiled]:
    """Starts to compile a step in another process; returns a function (config, shape, cluster) -> the compiled step.

    The returned function waits for the other process. If the other process fails, it compiles the step completely in
    this process, so that the error appears here. If no other process can compile the step (see `ends_early`), none is
    started, and the result is `compile_step`.

    Args:
      config: the configuration of the step.
      name: the cluster's name, such as `h100:8x8`.
    """
    if not ends_early(config, name):
        return compile_step
    result = start_copy(_compile_fields, config, name)
    return lambda config, shape, cluster: _with_assembly(result(), config, shape, cluster)


def compile_elsewhere(elsewhere: Work | None) -> Callable[[Config, Mapping[str, int], Cluster], Compiled]:
    """Returns a function (config, shape, cluster) -> compiled step, which compiles in other processes if possible.

    Args:
      elsewhere: the function that `server` returned, which runs the compilation in another process, only up to
        scheduling. None: the result is `compile_step`, which compiles completely, in this process.
    """
    if elsewhere is None:
        return compile_step
    return lambda config, shape, cluster: _with_assembly(
        elsewhere(_compile_fields, config, cluster.text), config, shape, cluster
    )


def _with_assembly(
    found: dict[str, Pickled] | None, config: Config, shape: Mapping[str, int], cluster: Cluster
) -> Compiled:
    """Returns a step that another process has compiled, with an assembly that uses this process's devices.

    If the other process failed, the step is compiled completely, in this process.

    Args:
      found: the fields of the compiled step, from `_compile_fields`; None if the other process failed.
      config: the configuration of the step.
      shape: mesh axis -> size.
      cluster: the target cluster.
    """
    if not found:
        return compile_step(config, shape, cluster)
    with as_on_target(cluster):
        return Compiled(assembly=assemble(config, shape, cluster.devices), **found)


def ends_early(config: Config, name: str) -> bool:
    """Returns whether steps can be compiled in other processes, which end as soon as XLA has dumped the program.

    This requires a GPU cluster, the jax version `COMPARED`, and a step without an extension. JAX must not be
    initialized in this process yet, because a forked process would lack JAX's threads.

    Args:
      config: the configuration of the steps.
      name: the cluster's name, such as `h100:8x8`.
    """
    compared = jax.__version__ == COMPARED and parse(name).device in GPUS and extensions.make_extension(config) is None
    return compared and not xla_bridge.backends_are_initialized()  # a forked process would lack JAX's threads


def server(config: Config, name: str) -> Work | None:
    """Starts a server process that compiles steps; returns a function that sends work to it and waits for the result.

    The returned function has the arguments (work, *arguments). For each call, the server forks a process, which calls
    `work(by, *arguments)`; `by` is a compiler to pass to `compile_step`, which ends after scheduling. The function
    returns the result of `work`, or None if the forked process fails. The server never initializes JAX, so it can
    fork even after this process has initialized JAX.

    If other processes cannot compile these steps (see `ends_early`), no server is started, and None is returned.

    Args:
      config: the configuration of the steps to compile.
      name: the cluster's name, such as `h100:8x8`.
    """
    if not ends_early(config, name):
        return None
    jobs, others = multiprocessing.Pipe()
    if os.fork() == 0:
        jobs.close()  # otherwise this process would not notice that the parent has ended
        try:
            while True:
                work, arguments = others.recv()
                others.send(start_copy(work, *arguments)())
        finally:
            os._exit(0)
    others.close()

    def call(work: Work, *arguments: Pickled) -> Pickled:
        jobs.send((work, arguments))
        return jobs.recv()

    return call


def start_copy(work: Work, *arguments: Pickled) -> Callable[[], Pickled]:
    """Starts `work(by, *arguments)` in a forked process; returns a function () -> result, which waits for the process.

    The result of `work` is pickled to send it to this process. It is None if the forked process fails.

    Args:
      work: function (by, *arguments) -> result; `by` is a compiler to pass to `compile_step`.
      arguments: the arguments of `work` after `by`.
    """
    folder = tempfile.TemporaryDirectory(prefix="meshtrain-plan-", ignore_cleanup_errors=True)
    fork = multiprocessing.get_context("fork")
    reading, writing = fork.Pipe(duplex=False)
    process = fork.Process(target=_send, args=(writing, Path(folder.name), work, *arguments), daemon=True)
    process.start()
    writing.close()

    def result() -> Pickled:
        result = None
        with folder, reading:
            with contextlib.suppress(EOFError):
                result = reading.recv()
            process.join()
        return result

    return result


def _send(writing: Connection, folder: Path, work: Work, *arguments: Pickled) -> None:
    """Calls `work` in a forked process, sends its result through a pipe, and ends this process.

    Args:
      writing: the end of the pipe to write to.
      folder: folder for XLA's dump and temporary files.
      work: function (by, *arguments) -> result; `by` is a compiler to pass to `compile_step`.
      arguments: the arguments of `work` after `by`.
    """
    os.environ["TMPDIR"] = str(folder)  # XLA leaves temporary files here if the process ends early
    jax.config.update("jax_enable_compilation_cache", False)  # a program from the cache is not dumped
    try:
        writing.send(work(functools.partial(_schedule, folder), *arguments))
    except KeyboardInterrupt:
        shutil.rmtree(folder, ignore_errors=True)  # no other process removes it then
    finally:
        os._exit(0)


def _compile_fields(by: Compiler, config: Config, name: str) -> dict[str, Pickled]:
    """Compiles a step in a forked process; returns name -> value of the fields of `Compiled`, without the assembly.

    The assembly contains devices, which are valid only in the process that created them.

    Args:
      by: function that compiles the lowered step.
      config: the configuration of the step.
      name: the cluster's name, such as `h100:8x8`.
    """
    cluster = open_cluster(name)
    made = compile_step(config, shape_on(config, cluster), cluster, by)
    return {key: value for key, value in vars(made).items() if key != "assembly"}


def _schedule(folder: Path, lowered: jax.stages.Lowered) -> tuple[SimpleNamespace, CompilerOptions]:
    """Compiles a lowered step up to XLA's dump; returns (stand-in for `jax.stages.Compiled`, {}).

    The second result is the added compiler options, as in `with_tiles`. A thread continues to compile after the return.

    Args:
      folder: folder for the dump.
      lowered: the lowered step.

    Raises:
      TimeoutError: the compiler ended without a complete dump.
    """
    options = {"xla_dump_to": str(folder), "xla_dump_hlo_as_proto": True}
    compiling = threading.Thread(target=lowered.compile, kwargs={"compiler_options": options}, daemon=True)
    compiling.start()
    while compiling.is_alive():
        time.sleep(POLL_SECONDS)
        for file in folder.glob("*_after_optimizations.hlo.pb"):
            with contextlib.suppress(DecodeError, KeyError):
                return compiled_stand_in(file.read_bytes()), {}
    raise TimeoutError("the compiler ended before its program could be read")


def compiled_stand_in(dump: bytes) -> SimpleNamespace:
    """Returns a stand-in for `jax.stages.Compiled`, with its program's text and memory statistics.

    Args:
      dump: a serialized `HloProto`.

    Raises:
      DecodeError, KeyError: the dump is incomplete.
      ValueError: the program has several heaps, or uses host memory; neither is supported here.
    """
    fields = _fields(dump)
    account = _account(_fields(fields[3][0]))
    program = HloModule.from_serialized_hlo_module_proto(fields[1][0])
    return SimpleNamespace(as_text=program.to_string, memory_analysis=lambda: account)


def _account(fields: Mapping[int, list[bytes]]) -> SimpleNamespace:
    """Returns memory statistics with the attributes of `jax.stages.Compiled.memory_analysis()`, in bytes.

    Args:
      fields: the fields of a `BufferAssignmentProto`, by number.

    Raises:
      ValueError: the program has several heaps, or uses host memory.
    """
    held = [one for one in map(_numbers, fields[3]) if not one[OF_THREAD]]
    if any(one[MEMORY] for one in held):
        raise ValueError("memory of the host")

    def total(*kinds: int) -> int:
        return sum(one[2] for one in held if all(one[kind] for kind in kinds))

    beside = sum(one[2] for one in held if one[PARAMETER] or one[OUTPUT] or one[CONSTANT])
    (trace,) = fields[4]
    return SimpleNamespace(
        argument_size_in_bytes=total(PARAMETER),
        output_size_in_bytes=total(OUTPUT),
        alias_size_in_bytes=total(PARAMETER, OUTPUT),
        temp_size_in_bytes=total() - beside,
        peak_memory_in_bytes=beside + _peak(trace, {one[1]: one[2] for one in map(_numbers, fields[1])}),
        **dict.fromkeys((f"host_{kind}_size_in_bytes" for kind in ("argument", "output", "alias", "temp")), 0),
    )


def _peak(trace: bytes, size: Mapping[int, int]) -> int:
    """Returns the peak bytes of the heap; values that share a buffer count once.

    Args:
      trace: a serialized `HeapSimulatorTrace`.
      size: id of a value -> its bytes.
    """
    owner, num_users, used, peak = dict[int, int](), collections.Counter[int](), 0, 0
    for event in map(_numbers, _fields(trace)[1]):
        kind, value = event[1], event[2]
        if kind != FREE:
            owner[value] = owner[event[5]] if kind == SHARE else value
        first = owner[value]
        was_used = num_users[first] > 0
        num_users[first] += -1 if kind == FREE else 1
        used += ((num_users[first] > 0) - was_used) * size[first]
        peak = max(peak, used)
    return peak


def _fields(message: bytes) -> dict[int, list[Datum]]:
    """Returns field number -> values of a serialized message.

    Raises:
      DecodeError: the message is incomplete.
    """
    result: dict[int, list[Datum]] = {}
    for one in UnknownFieldSet(Empty.FromString(message)):
        result.setdefault(one.field_number, []).append(one.data)
    return result


def _numbers(message: bytes) -> collections.Counter[int]:
    """Returns field number -> first value of a serialized message; 0 for fields that it lacks."""
    return collections.Counter({number: value for number, (value, *_) in _fields(message).items()})
