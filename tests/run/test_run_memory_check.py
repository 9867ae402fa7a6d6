"""A run that does not fit the memory: refused before any array exists, warned of, or ended by one line."""

import dataclasses
from types import SimpleNamespace

import jax
import pytest
from jax.errors import JaxRuntimeError

from meshtrain import errors, loop, training
from meshtrain.assembly.assemble import assemble
from meshtrain.config import smaller
from meshtrain.config.build import default
from meshtrain.config.mesh_checks import check
from meshtrain.config.resolve import resolve
from meshtrain.errors import UserError
from meshtrain.main import main
from meshtrain.run import initial_state, memory_check
from meshtrain.run.memory_check import Room
from meshtrain.sharding.mesh import mesh_shape
from meshtrain.sharding.rules import AXES

TOO_MUCH = "RESOURCE_EXHAUSTED: Out of memory allocating 123456 bytes."


def configured(**sizes):
    config = default()
    config.batch_size, config.sequence_length, config.data.source = 16, 32, "synthetic"
    config.model.num_layers = 2
    config.model.embed_dim = config.model.mlp_dim = config.model.head_dim = 16
    config.model.num_heads = config.model.num_kv_heads = 2
    for axis, size in sizes.items():
        config.mesh[axis] = size
    return resolve(config)


def assembled(config):
    return assemble(config, mesh_shape(config.mesh, 8, simulated=True), jax.devices())


def needed(config):
    room = Room(1, 8, is_host=True, what="")
    return memory_check.bytes_needed(assembled(config), room)


def fix_of(line):
    """Returns the changes that a line names as dotted key -> value."""
    words = line.rpartition("nearest: ")[2].partition(" (")[0].split()
    pairs = (word.removeprefix("--config.").split("=") for word in words)
    return {key: int(value) if value.isdecimal() else value for key, value in pairs}


@pytest.fixture
def host(monkeypatch):
    """A function that sets the bytes of main memory."""
    return lambda limit: monkeypatch.setattr(memory_check, "most_bytes", lambda: limit)


def test_a_state_that_fits_to_the_byte_is_not_refused(host):
    config = configured(data=8)
    whole = needed(config)
    host(whole)
    memory_check.refuse_too_large(assembled(config))
    host(None)
    memory_check.refuse_too_large(assembled(config))
    host(whole - 1)
    with pytest.raises(UserError, match="of training state on 8 devices; allowed: at most"):
        memory_check.refuse_too_large(assembled(config))


@pytest.mark.parametrize(
    "sizes, share, change",
    [
        ({"data": 8}, 0.6, {"zero.level": 1}),  # of 3 parts, 2 are moments, of which one eighth stays
        ({"data": 8}, 0.3, {"zero.level": 3}),
        ({"data": 2, "fsdp": 4}, 0.7, {"zero.level": 1}),
        ({"fsdp": 8}, 0.7, {"optimizer.moments": "bfloat16"}),
    ],
)
def test_the_smallest_change_that_helps_is_named_and_is_accepted(host, sizes, share, change):
    config = configured(**sizes)
    limit = int(share * needed(config))
    host(limit)
    with pytest.raises(UserError) as caught:
        memory_check.refuse_too_large(assembled(config))
    [line] = caught.value.problems
    assert fix_of(line) == change
    changed = smaller.with_change(config, change)
    assert not check(changed, dict.fromkeys(AXES, 1) | sizes)
    assert needed(changed) <= limit
    memory_check.refuse_too_large(assembled(changed))


def test_what_no_change_can_hold_is_a_plan_for_a_cluster(host):
    config = configured(fsdp=8)
    host(1000)
    with pytest.raises(UserError, match="nearest: a cluster: meshtrain plan --cluster=h100:1x8 --search"):
        memory_check.refuse_too_large(assembled(config))
    assert (
        memory_check._plan(10**12 * 3 // 2)
        == "a cluster: meshtrain plan --cluster=h100:3x8 --search with the same configuration"
    )


def test_a_run_is_refused_before_anything_is_compiled_or_written(host, command, tmp_path):
    host(100_000)
    compiled = []

    def note(name, seconds, **what):
        if name == "/jax/core/compile/jaxpr_to_mlir_module_duration":
            compiled.append(what["fun_name"])

    jax.monitoring.register_event_duration_secs_listener(note)
    try:
        with pytest.raises(
            UserError, match=r"^memory: got .* of training state on 8 devices; allowed: at most 97.7 KiB"
        ):
            main(command(tmp_path / "run", "mesh.fsdp=8"))
    finally:
        jax.monitoring.unregister_event_duration_listener(note)
    assert not compiled
    assert not (tmp_path / "run").exists()


def test_weights_alone_are_compared_for_commands_that_do_not_train(host):
    assembly = assembled(configured(data=8))
    params = jax.tree.leaves(assembly.state.params)
    whole = sum(leaf.size * leaf.dtype.itemsize for leaf in params)
    host(whole)  # copies of eight replicas may share the bytes that were loaded
    memory_check.refuse_large_weights(assembly)
    host(whole - 1)
    with pytest.raises(UserError, match="of weights; allowed: at most"):
        memory_check.refuse_large_weights(assembly)


def fake(platform, stats):
    """Returns what stands for an assembly on two devices."""
    device = SimpleNamespace(platform=platform, process_index=0, device_kind="a card", memory_stats=lambda: stats)
    return SimpleNamespace(mesh=SimpleNamespace(devices=SimpleNamespace(flat=[device, device])))


def test_an_accelerator_has_memory_of_its_own_and_simulated_devices_share_the_hosts(host):
    host(1000)
    assert memory_check.room_of(fake("cpu", None)) == Room(1000, 2, True, "the memory of this machine or container")
    card = Room(5, 1, False, "the part of the memory of a a card that JAX uses")
    assert memory_check.room_of(fake("gpu", {"bytes_limit": 5})) == card
    assert memory_check.room_of(fake("gpu", None)) is None
    host(None)
    assert memory_check.room_of(fake("cpu", None)) is None


def compiled(temporary_bytes):
    """Returns what stands for a compiled step."""
    names = ("argument", "output", "alias")
    sizes = {f"{name}_size_in_bytes": 0 for name in names} | {"temp_size_in_bytes": temporary_bytes}
    on_host = {f"host_{name}_size_in_bytes": 0 for name in (*names, "temp")}
    account = SimpleNamespace(**sizes, **on_host, peak_memory_in_bytes=0)
    return SimpleNamespace(memory_analysis=lambda: account)


def test_a_step_that_may_not_fit_is_one_warning(host, capsys):
    assembly = assembled(configured(data=8))
    host(8 * 2**20)
    memory_check.warn_of_large_step(assembly, compiled(2**20))
    assert capsys.readouterr().err == ""
    memory_check.warn_of_large_step(assembly, compiled(2**21))
    [line] = capsys.readouterr().err.splitlines()
    assert "the compiled step needs up to 16 MiB, but 8 MiB is the memory of this machine" in line
    assert "nearest: --config.zero.level=1" in line


def raising(error):
    def act(*_, **__):
        raise error

    return act


@pytest.mark.parametrize(
    "where, error",
    [
        ("restore_or_initialize", MemoryError("no 80 GB")),
        ("compiled_step", JaxRuntimeError(TOO_MUCH)),
        ("run", JaxRuntimeError(TOO_MUCH)),
        ("show", JaxRuntimeError(TOO_MUCH)),
    ],
)
def test_memory_that_runs_out_is_one_line(where, error, command, tmp_path, monkeypatch):
    if where == "show":
        monkeypatch.setattr(training, "run_loop", lambda *_: (None, {}))
    monkeypatch.setattr(initial_state, "trace_steps", lambda *_: None)
    monkeypatch.setattr(initial_state, "compiled_step", lambda *_: (compiled(2**20), None))
    monkeypatch.setattr(initial_state, "restore_or_initialize", lambda *_: (None, 0, {}))
    module = {"run": loop, "show": training.summary}
    monkeypatch.setattr(module[where] if where in module else initial_state, where, raising(error))
    with pytest.raises(UserError) as caught:
        main(command(tmp_path / "run", "mesh.data=8", "num_steps=2"))
    [line] = caught.value.problems
    assert line.startswith(f"memory: got '{error}'; planned per device: training state ")
    assert ("peak" in line) == (where == "run")
    assert "largest arrays: " in line
    assert fix_of(line) == {"zero.level": 1}


def test_another_error_of_the_runtime_keeps_its_traceback():
    with pytest.raises(JaxRuntimeError, match="INTERNAL"), memory_check.explain_memory(assembled(configured(data=8))):
        raise JaxRuntimeError("INTERNAL: a bug")


@pytest.mark.parametrize("error", [JaxRuntimeError(TOO_MUCH), MemoryError()], ids=["XLA", "Python"])
def test_every_command_ends_with_one_line_and_code_2(error, capsys):
    with pytest.raises(SystemExit) as end:
        errors.run(raising(error))
    assert end.value.code == errors.EXIT_USER_ERROR
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("meshtrain: error: memory: got '")
    with pytest.raises(RuntimeError, match="INTERNAL"):
        errors.run(raising(JaxRuntimeError("INTERNAL: a bug")))


def test_a_change_to_an_open_axis_is_suggested_with_sizes():
    config = configured(data=8)
    config = dataclasses.replace(config, mesh=dataclasses.replace(config.mesh, data=-1))
    assert memory_check._step_fix(assembled(config), None, None).startswith("--config.zero.level=1 ")


@pytest.mark.parametrize("temporaries, steps", [(2**20, 2), (2**21, 2), (2**21 + 1, 4), (2**23, 8), (2**40, 16)])
def test_a_step_is_cut_until_its_temporaries_fit(host, capsys, temporaries, steps):
    host(2**20)
    memory_check.warn_of_large_step(assembled(configured()), compiled(max(temporaries, 2**20 + 1)))
    assert fix_of(capsys.readouterr().err) == {"accumulation_steps": steps}
