"""Plans from what XLA dumps: against whole compilations, and bytes against counts by hand."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from google.protobuf.message import DecodeError

from meshtrain.config.schema import LocalStepsOptions
from meshtrain.plan import scheduled_hlo
from meshtrain.plan.cluster import compile as compiling
from meshtrain.plan.hlo import parse
from scripts.benchmarks import plan_ratio

ALLOCATE, FREE, SHARE = range(3)
MIB = 2**20


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    """(what a compilation dumped, what it returned) of a loop that updates weights in place."""

    def step(w, x):
        y, sums = jax.lax.scan(lambda carry, _: (jnp.tanh(carry @ w), carry.sum()), x, None, length=7)
        return w - 0.1 * jnp.sort(y, axis=0).T @ y, sums

    folder = tmp_path_factory.mktemp("dump")
    lowered = jax.jit(step, donate_argnums=0).lower(jnp.ones((64, 64)), jnp.ones((16, 64)))
    name = "jax_persistent_cache_min_compile_time_secs"
    before = getattr(jax.config, name)
    jax.config.update(name, 1e9)  # a program from the cache is not dumped, so this one is not kept there
    whole = lowered.compile(compiler_options={"xla_dump_to": str(folder), "xla_dump_hlo_as_proto": True})
    jax.config.update(name, before)
    (dump,) = folder.glob("*_after_optimizations.hlo.pb")
    return dump.read_bytes(), whole


def lines(program):
    """What the planner counts by: each line of each computation, and its runs."""
    return {
        name: (program.num_runs[name], [(line.name, line.shape, line.opcode, line.operands) for line in body])
        for name, body in program.computations.items()
    }


def test_a_dump_has_the_program_and_the_bytes_of_the_compilation(both):
    dump, whole = both
    found = scheduled_hlo.compiled_stand_in(dump)
    program = parse.read(found.as_text())
    assert lines(program) == lines(parse.read(whole.as_text()))
    assert 7 in program.num_runs.values()
    names = [name for name in vars(found.memory_analysis()) if "peak" not in name]  # the CPU's leaves out temporaries
    assert len(names) == 8
    assert all(getattr(found.memory_analysis(), name) == getattr(whole.memory_analysis(), name) for name in names)


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.9, 0.999])
def test_a_part_of_a_dump_is_not_read(both, share):
    dump, _ = both
    with pytest.raises((DecodeError, KeyError)):
        scheduled_hlo.compiled_stand_in(dump[: int(share * len(dump))])


def varint(value):
    return bytes([value]) if value < 128 else bytes([value % 128 + 128]) + varint(value // 128)


def field(number, value):
    return varint(8 * number) + varint(value) if isinstance(value, int) else (
        varint(8 * number + 2) + varint(len(value)) + value
    )  # fmt: skip


def message(**fields):
    """Returns a serialized message: `_3=value`, or a list of values, is field 3."""
    values = {int(name[1:]): value if isinstance(value, list) else [value] for name, value in fields.items()}
    return b"".join(field(number, value) for number, several in values.items() for value in several)


def dumped(program, sizes, allocations, *traces):
    """Returns an HloProto with values of these sizes, allocations, and (kind, value, value shared with) of heaps."""
    heaps = [message(_1=[message(_1=kind, _2=value, _5=other) for kind, value, other in trace]) for trace in traces]
    logical = [message(_1=number, _2=size) for number, size in sizes.items()]
    return message(_1=program, _3=message(_1=logical, _3=allocations, _4=heaps))


# A parameter that is updated in place, an output, a constant, the heap, and what one thread has for itself.
ALLOCATIONS = [
    message(_2=40, _5=1, _7=1), message(_2=7, _7=1), message(_2=3, _12=1), message(_2=300 * MIB), message(_2=999, _3=1),
]  # fmt: skip
SIZES = {1: 100 * MIB, 2: 50 * MIB, 3: 200 * MIB, 4: 100 * MIB}


@pytest.mark.parametrize(
    ("events", "heap"),
    [
        ([(ALLOCATE, 1, 0), (ALLOCATE, 2, 0), (FREE, 1, 0), (ALLOCATE, 3, 0)], 250 * MIB),
        # 4 has the bytes of 1, which are in use until both are freed.
        ([(ALLOCATE, 1, 0), (SHARE, 4, 1), (FREE, 1, 0), (ALLOCATE, 3, 0), (FREE, 4, 0), (ALLOCATE, 2, 0)], 300 * MIB),
        ([(ALLOCATE, 1, 0), (SHARE, 4, 1), (FREE, 1, 0), (FREE, 4, 0), (ALLOCATE, 3, 0)], 200 * MIB),
        # Bytes that were freed are in use again once they are shared.
        ([(ALLOCATE, 1, 0), (FREE, 1, 0), (ALLOCATE, 3, 0), (SHARE, 4, 1)], 300 * MIB),
    ],
    ids=["one after another", "shared", "shared and freed", "shared after it was freed"],
)
def test_the_peak_is_of_what_is_in_use_at_one_time(both, events, heap):
    program = both[1].runtime_executable().hlo_modules()[0].as_serialized_hlo_module_proto()
    found = scheduled_hlo.compiled_stand_in(dumped(program, SIZES, ALLOCATIONS, events)).memory_analysis()
    sizes = (found.argument_size_in_bytes, found.output_size_in_bytes, found.alias_size_in_bytes)
    assert sizes == (40, 47, 40)
    assert found.temp_size_in_bytes == 300 * MIB
    assert found.peak_memory_in_bytes == 40 + 7 + 3 + heap


@pytest.mark.parametrize(
    ("allocations", "num_heaps"),
    [([*ALLOCATIONS, message(_2=5, _5=1, _8=5)], 1), (ALLOCATIONS, 2)],
    ids=["host", "heaps"],
)
def test_other_memory_is_left_to_a_whole_compilation(both, allocations, num_heaps):
    dump = dumped(b"", SIZES, allocations, *[[(ALLOCATE, 1, 0)]] * num_heaps)
    with pytest.raises(ValueError, match=r"memory of the host|too many values"):
        scheduled_hlo.compiled_stand_in(dump)


def test_what_was_not_compared_is_compiled_whole(small, monkeypatch):
    config = small({"data": 2})
    monkeypatch.setattr(scheduled_hlo.multiprocessing, "get_context", None)  # no process is started
    assert scheduled_hlo.start_compiling(config, "h100:1x2") is compiling.compile_step  # this process has used JAX
    monkeypatch.setattr(scheduled_hlo.xla_bridge, "backends_are_initialized", lambda: False)
    assert scheduled_hlo.start_compiling(config, "cpu:2") is compiling.compile_step
    assert scheduled_hlo.start_compiling(config, "v5e:1x2") is compiling.compile_step
    grouped = small({"data": 2}, local_steps=LocalStepsOptions(period=10, groups=2))
    assert scheduled_hlo.start_compiling(grouped, "h100:1x2") is compiling.compile_step
    monkeypatch.setattr(scheduled_hlo, "COMPARED", "0.11.2")
    assert scheduled_hlo.start_compiling(config, "h100:1x2") is compiling.compile_step


RUN = (
    "import sys; from meshtrain.plan import __main__, scheduled_hlo; scheduled_hlo.GPUS = ('cpu',); "
    "scheduled_hlo.COMPARED = '{}'; {}"
)
WORDS = ("--cluster=cpu:2", "--config.mesh.data=2", "--config.batch_size=4", "--config.model.embed_dim=64",
         "--config.sequence_length=16")  # fmt: skip


@pytest.mark.parametrize(
    ("change", "is_early"), [("", True), ("scheduled_hlo._fields = None; ", False)], ids=["early", "unread"]
)
def test_a_process_compiles_and_leaves_nothing_behind(tmp_path, change, is_early):
    """For CPUs, whose compiler dumps the same file."""
    code = RUN.format(jax.__version__, change + "__main__.main(sys.argv[1:])")
    if is_early:
        code = code.replace("__main__.main", "scheduled_hlo.compile_step.__defaults__ = (); __main__.main")
    file = tmp_path / "plan.json"
    (tmp_path / "tmp").mkdir()
    environment = os.environ | {"TMPDIR": str(tmp_path / "tmp")}
    subprocess.run([sys.executable, "-c", code, *WORDS, f"--json={file}"], check=True, env=environment)
    assert json.loads(file.read_text())["num_devices"] == 2
    assert list((tmp_path / "tmp").iterdir()) == []


SERVED = """
import jax
from meshtrain.config.schema import Config
from meshtrain.plan import scheduled_hlo
from tests.plan.test_plan_scheduled_hlo import halved
scheduled_hlo.GPUS, scheduled_hlo.COMPARED = ("cpu",), jax.__version__
call = scheduled_hlo.server(Config(), "cpu:2")
assert jax.devices() and scheduled_hlo.server(Config(), "cpu:2") is None
print([call(halved, number) for number in (4, 3)])
"""


def halved(by, number):
    """Work for a process; it leaves a file where XLA does."""
    Path(os.environ["TMPDIR"], "left").touch()
    return number // 2 if number % 2 == 0 else None / by


def test_once_a_process_has_started_jax_another_is_copied_that_has_not(tmp_path):
    run = {"env": os.environ | {"TMPDIR": str(tmp_path)}, "capture_output": True, "text": True, "check": True}
    done = subprocess.run([sys.executable, "-c", SERVED], **run)
    assert (done.stdout, done.stderr) == ("[2, None]\n", "")  # what fails there is compiled whole
    assert not list(tmp_path.glob("meshtrain-plan-*"))


@pytest.mark.gpu_compiler
def test_a_plan_has_the_numbers_of_a_whole_compilation(capsys):
    assert plan_ratio.main(["tiny=h100:1x8"]) == 0
    assert "0 different or without" in capsys.readouterr().out
