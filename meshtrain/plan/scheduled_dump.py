"""Plans a GPU's step from what XLA dumps once it has scheduled it: a plan needs no kernels.

XLA has no option that ends there, so another process compiles, and ends when the dump is complete: an `HloProto`. The
numbers of fields below are those of xla/service/hlo.proto.
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

from meshtrain.assemble import assemble
from meshtrain.config.config import Config
from meshtrain.launch.compiler import CompilerOptions
from meshtrain.plan.planner import shape_on
from meshtrain.plan.target.attention_tracing import as_on_target
from meshtrain.plan.target.clusters import GPUS, Cluster, open_cluster, parse
from meshtrain.plan.target.compile import Compiled, Compiler, compile_step

COMPARED = ("0.10.2", "0.12.0.1")  # with these `scripts/bench plan_ratio` finds the plans of whole compilations
POLL_SECONDS = 0.05
OF_THREAD, PARAMETER, OUTPUT, MEMORY, CONSTANT = 3, 5, 7, 8, 12  # of a BufferAllocationProto
Pickled: TypeAlias = Any  # what one process sends another
Datum: TypeAlias = Any  # of a field of a message: an int, or the bytes of a text or of a message
Work = Callable[..., Pickled]  # by a process of its own
FREE, SHARE = 1, 2  # kinds of a HeapSimulatorTrace.Event; 0 allocates


def started(config: Config, name: str) -> Callable[[Config, Mapping[str, int], Cluster], Compiled]:
    """Starts to compile for the cluster of this name; returns what waits for it, to call instead of `compile_step`.

    What was not compared is compiled whole. So is what the process does not bring to an end: its error comes again.
    """
    if not ends_early(config, name):
        return compile_step
    result = begun(_compiled, config, name)
    return lambda config, shape, cluster: _assembled(result(), config, shape, cluster)


def compiled_by(elsewhere: Work | None) -> Callable[[Config, Mapping[str, int], Cluster], Compiled]:
    """Returns what compiles several steps in copies of this process, to call instead of `compile_step`.

    Args:
      elsewhere: from `server`; None compiles steps whole, in this process.
    """
    if elsewhere is None:
        return compile_step
    return lambda config, shape, cluster: _assembled(elsewhere(_compiled, config, cluster.text), config, shape, cluster)


def _assembled(
    found: dict[str, Pickled] | None, config: Config, shape: Mapping[str, int], cluster: Cluster
) -> Compiled:
    """Returns a compiled step with the assembly of this process; compiles whole what another did not bring to an end.

    Args:
      found: from `_compiled`, or None.
      config: of the step.
      shape: the size of each mesh axis.
      cluster: the target.
    """
    if not found:
        return compile_step(config, shape, cluster)
    with as_on_target(cluster):
        return Compiled(assembly=assemble(config, shape, cluster.devices), **found)


def ends_early(config: Config, name: str) -> bool:
    """Returns whether steps are planned from dumps, by copies of this process: for the cluster of this name."""
    compared = jax.__version__ in COMPARED and parse(name).device in GPUS and not config.local_steps.period
    return compared and not xla_bridge.backends_are_initialized()  # a copy would lack JAX's threads


def server(config: Config, name: str) -> Work | None:
    """Returns (work, *arguments) -> the result, see `begun`; it can be called once this process has started JAX.

    A process stays as this one is now, and is copied for each call. None where steps are compiled whole.
    """
    if not ends_early(config, name):
        return None
    jobs, others = multiprocessing.Pipe()
    if os.fork() == 0:
        jobs.close()  # or this process would not see that the other has ended
        try:
            while True:
                work, arguments = others.recv()
                others.send(begun(work, *arguments)())
        finally:
            os._exit(0)
    others.close()

    def call(work: Work, *arguments: Pickled) -> Pickled:
        jobs.send((work, arguments))
        return jobs.recv()

    return call


def begun(work: Work, *arguments: Pickled) -> Callable[[], Pickled]:
    """Starts `work(by, *arguments)` in a copy of this process; returns what waits for its result.

    `by` is for `compile_step`. The result is pickled. It is None if the process does not bring the work to an end.
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
    """Sends what `work` returns, and ends the process."""
    os.environ["TMPDIR"] = str(folder)  # where XLA leaves its files when it ends so
    jax.config.update("jax_enable_compilation_cache", False)  # a program from the cache is not dumped
    try:
        writing.send(work(functools.partial(_scheduled, folder), *arguments))
    except KeyboardInterrupt:
        shutil.rmtree(folder, ignore_errors=True)  # nothing else does then
    finally:
        os._exit(0)


def _compiled(by: Compiler, config: Config, name: str) -> dict[str, Pickled]:
    """Returns what is compiled but its assembly, whose devices are this process's."""
    cluster = open_cluster(name)
    made = compile_step(config, shape_on(config, cluster), cluster, by)
    return {key: value for key, value in vars(made).items() if key != "assembly"}


def _scheduled(folder: Path, lowered: jax.stages.Lowered) -> tuple[SimpleNamespace, CompilerOptions]:
    """Returns what stands for a `jax.stages.Compiled`, and no added options; a thread goes on compiling."""
    options = {"xla_dump_to": str(folder), "xla_dump_hlo_as_proto": True}
    compiling = threading.Thread(target=lowered.compile, kwargs={"compiler_options": options}, daemon=True)
    compiling.start()
    while compiling.is_alive():
        time.sleep(POLL_SECONDS)
        for file in folder.glob("*_after_optimizations.hlo.pb"):
            with contextlib.suppress(DecodeError, KeyError):
                return compiled_of(file.read_bytes()), {}
    raise TimeoutError("the compiler ended before its program was seen")


def compiled_of(dump: bytes) -> SimpleNamespace:
    """Returns what stands for a `jax.stages.Compiled`, from a serialized `HloProto`.

    Raises:
      DecodeError, KeyError: it is not complete.
      ValueError: several heaps, or memory of the host, of which this knows nothing.
    """
    fields = _fields(dump)
    account = _account(_fields(fields[3][0]))
    program = HloModule.from_serialized_hlo_module_proto(fields[1][0])
    return SimpleNamespace(as_text=program.to_string, memory_analysis=lambda: account)


def _account(fields: Mapping[int, list[bytes]]) -> SimpleNamespace:
    """Returns what `memory_analysis` does, from a `BufferAssignmentProto`."""
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
    """Returns the most bytes of the heap in use at one time; values that share bytes count once."""
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
    """Returns number -> values of each field of a serialized message; raises DecodeError if it is not complete."""
    result: dict[int, list[Datum]] = {}
    for one in UnknownFieldSet(Empty.FromString(message)):
        result.setdefault(one.field_number, []).append(one.data)
    return result


def _numbers(message: bytes) -> collections.Counter[int]:
    """Returns number -> value of each field; 0 for those that are not there."""
    return collections.Counter({number: value for number, (value, *_) in _fields(message).items()})
