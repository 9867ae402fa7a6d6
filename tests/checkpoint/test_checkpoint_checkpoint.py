"""A state comes back bitwise, on any mesh; what does not fit is refused by name; the newest save is never lost."""

import dataclasses
import json
import logging
import shutil
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from orbax.checkpoint._src.path import atomicity

from meshtrain.checkpoint import integrity
from meshtrain.checkpoint.checkpoint import CHECKPOINTS, Checkpoints
from meshtrain.checkpoint.other_runs import find, restore_params
from meshtrain.checkpoint.retention import CheckpointOptions
from meshtrain.errors import SaveFailed, UserError

EXTRA = {"data": {"next_example": 96}, "versions": {"jax": jax.__version__}, "configuration": {"seed": 0}}


def mesh(*sizes):
    return jax.make_mesh(sizes, ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)


def placed(tree, mesh, spec):
    """Arrays of at least two dims by `spec`, the others on every device."""
    return jax.tree.map(lambda x: jax.device_put(x, NamedSharding(mesh, spec if x.ndim >= 2 else P())), tree)


def abstract(tree, mesh, spec):
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec if x.ndim >= 2 else P())),
        tree,
    )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class State:
    step: jax.Array
    params: dict
    opt_state: tuple
    rng: jax.Array


def make_state() -> State:
    """A state with a bfloat16 weight and an optimizer whose state holds tuples, empty states and masked leaves."""
    keys = jax.random.split(jax.random.key(0), 3)
    params = {
        "layers": {"up": jax.random.normal(keys[0], (4, 8, 16)), "scale": jnp.ones(16)},
        "embed": jax.random.normal(keys[1], (32, 8)).astype(jnp.bfloat16),
    }
    mask = {"layers": {"up": True, "scale": False}, "embed": True}
    transformation = optax.chain(optax.clip_by_global_norm(1.0), optax.masked(optax.adam(1e-3), mask))
    state = State(jnp.int32(7), params, transformation.init(params), jax.random.key_data(keys[2]))
    return placed(state, mesh(2, 4), P("data", "tensor"))


def assert_same(got, want):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert a.dtype == b.dtype
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


@pytest.fixture(scope="module")
def workdir(tmp_path_factory) -> Path:
    """A finished run of 7 steps."""
    directory = tmp_path_factory.mktemp("run")
    with Checkpoints(directory / CHECKPOINTS, CheckpointOptions()) as checkpoints:
        assert checkpoints.latest_step() is None
        assert checkpoints.save(7, make_state(), EXTRA)
    return directory


@pytest.mark.parametrize(("sizes", "spec"), [((2, 4), P("data", "tensor")), ((8, 1), P(None, "data")), ((1, 2), P())])
def test_restores_bitwise_onto_other_meshes(workdir, sizes, spec):
    state = make_state()
    wanted = abstract(state, mesh(*sizes), spec)
    with Checkpoints(workdir / CHECKPOINTS, None) as checkpoints:
        got = checkpoints.restore(7, wanted)
    assert_same(got, state)
    assert json.loads((workdir / CHECKPOINTS / "7" / "extra" / "metadata").read_text()) == EXTRA
    assert jax.tree.map(lambda x: x.sharding, got) == jax.tree.map(lambda x: x.sharding, wanted)


def test_restores_into_another_container_of_the_same_names(workdir):
    state = make_state()
    as_dict = {"step": state.step, "params": state.params, "opt_state": state.opt_state, "rng": state.rng}
    with Checkpoints(workdir / CHECKPOINTS, None) as checkpoints:
        got = checkpoints.restore(7, abstract(as_dict, mesh(2, 4), P()))
    assert_same(got, as_dict)


def test_restores_into_host_memory_where_asked(workdir):
    wanted = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding.with_memory_kind("pinned_host")),
        make_state(),
    )
    with Checkpoints(workdir / CHECKPOINTS, None) as checkpoints:
        got = checkpoints.restore(7, wanted)
    assert {leaf.sharding.memory_kind for leaf in jax.tree.leaves(got)} == {"pinned_host"}


def test_save_holds_the_values_of_its_step_while_training_overwrites_the_buffers(tmp_path):
    spec = P("data", "tensor")
    shardings = NamedSharding(mesh(2, 4), spec)
    state = {f"w{i}": jax.device_put(jnp.full((512, 512), float(i)), shardings) for i in range(4)}
    step = jax.jit(lambda tree: jax.tree.map(lambda x: x + 100, tree), donate_argnums=0)
    state = step(state)
    want = jax.tree.map(np.array, state)
    with Checkpoints(tmp_path, CheckpointOptions()) as checkpoints:
        checkpoints.save(1, state, {})
        for _ in range(5):
            state = step(state)
        jax.block_until_ready(state)
        checkpoints.wait()
        got = checkpoints.restore(1, abstract(want, mesh(2, 4), spec))
    assert_same(got, want)


def test_keeps_the_newest_and_skips_a_step_that_is_there(tmp_path):
    state = {"w": jnp.arange(4.0)}
    with Checkpoints(tmp_path, CheckpointOptions(keep_last=2)) as checkpoints:
        saved = [checkpoints.save(step, state, {"step": step}) for step in (2, 4, 6, 6)]
        assert saved == [True, True, True, False]
        assert checkpoints.steps() == [4, 6]
        assert checkpoints.latest_step() == 6
    with Checkpoints(tmp_path, CheckpointOptions(keep_last=1)) as checkpoints:
        assert not checkpoints.save(6, {"w": jnp.zeros(4)}, {})
        assert checkpoints.save(7, state, {})
        assert checkpoints.steps() == [7]
    assert [path.name for path in tmp_path.iterdir()] == ["7"]


def test_a_save_killed_half_way_is_ignored_and_cleaned_up(workdir, tmp_path):
    directory = tmp_path / CHECKPOINTS
    shutil.copytree(workdir / CHECKPOINTS, directory)
    half = directory / "8.orbax-checkpoint-tmp"
    shutil.copytree(directory / "7" / "state", half / "state.orbax-checkpoint-tmp")
    shutil.copy(directory / "7" / "_CHECKPOINT_METADATA", half)
    with Checkpoints(directory, None) as reader:
        assert reader.latest_step() == 7
    assert half.exists(), "a reader cleaned up what another process may still write"
    with Checkpoints(directory, CheckpointOptions()) as checkpoints:
        assert checkpoints.latest_step() == 7
        assert checkpoints.save(9, make_state(), EXTRA)
        assert checkpoints.steps() == [7, 9]
    assert {path.name for path in directory.iterdir()} == {"7", "9"}


def test_a_failed_save_keeps_no_thread_for_which_python_waits_at_its_end(tmp_path, monkeypatch):
    """Orbax's threads wait five minutes for a folder that could not be made."""

    async def fail(*_):
        raise FileExistsError("another run's")

    before = set(threading.enumerate())
    monkeypatch.setattr(atomicity.AtomicRenameTemporaryPath, "create", fail)
    with Checkpoints(tmp_path, CheckpointOptions()) as checkpoints, pytest.raises(SaveFailed, match="another run's"):
        _ = checkpoints.save(1, {"w": jnp.zeros(3)}, {}), checkpoints.wait()
    kept = [thread for thread in threading.enumerate() if thread not in before and not thread.daemon]
    assert kept == []


def test_orbax_keeps_quiet_and_others_do_not(tmp_path, caplog):
    """A reader without handlers warns about every item; errors and other libraries' words must pass."""
    with Checkpoints(tmp_path, CheckpointOptions()) as checkpoints:
        checkpoints.save(1, {"w": jnp.zeros(1)}, {})
    with ocp.CheckpointManager(tmp_path) as plain:
        plain.item_metadata(1)
    description = tmp_path / "1" / "_CHECKPOINT_METADATA"
    description.write_bytes(description.read_bytes()[:-1])
    with (
        Checkpoints(tmp_path, None) as checkpoints,
        pytest.raises(UserError, match=r"_CHECKPOINT_METADATA: .* bytes instead"),
    ):
        checkpoints.newest_whole()
    assert not caplog.records
    logging.getLogger("absl").warning("of another library")
    assert [record.message for record in caplog.records] == ["of another library"]


def test_arrays_lie_under_names_that_other_readers_see(workdir):
    tree = ocp.PyTreeCheckpointer().metadata(workdir / CHECKPOINTS / "7" / "state").item_metadata.tree
    assert tree["params"]["layers"]["up"].shape == (4, 8, 16)
    assert set(tree) == {"step", "params", "opt_state", "rng"}


def refused(workdir, change) -> tuple[str, ...]:
    wanted = change(abstract(make_state(), mesh(2, 4), P()))
    with Checkpoints(workdir / CHECKPOINTS, None) as checkpoints, pytest.raises(UserError) as caught:
        checkpoints.restore(7, wanted)
    return caught.value.problems


def with_params(**changes):
    def change(state):
        params = {**state.params, **changes}
        return State(state.step, {k: v for k, v in params.items() if v}, state.opt_state, state.rng)

    return change


@pytest.mark.parametrize(
    ("shape", "dtype", "allowed"),
    [((32, 8), jnp.float32, "float32[32, 8]"), ((32, 16), jnp.bfloat16, "bfloat16[32, 16]")],
)
def test_another_shape_or_dtype_is_refused_and_not_converted(workdir, shape, dtype, allowed):
    first, nearest_fix = refused(workdir, with_params(embed=jax.ShapeDtypeStruct(shape, dtype)))
    assert f"params/embed: got bfloat16[32, 8]; allowed: {allowed}" in first
    assert "nearest:" in nearest_fix


def test_a_missing_and_a_leftover_array_are_refused_by_name(workdir):
    missing, leftover, _ = refused(workdir, with_params(embed=None, embeds=jax.ShapeDtypeStruct((32, 8), jnp.bfloat16)))
    assert "params/embeds: not in the checkpoint; did you mean 'params/embed'?" in missing
    assert "params/embed: in the checkpoint, not in this run" in leftover


def test_many_differences_are_counted(workdir):
    def change(state):
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct((*x.shape, 3), x.dtype), state)

    problems = refused(workdir, change)
    assert len(problems) == 7
    assert "more arrays differ" in problems[5]


def test_an_unknown_step_is_refused_with_those_there_are(workdir):
    unknown = pytest.raises(UserError, match=r"got step 8; allowed: 7")
    with Checkpoints(workdir / CHECKPOINTS, None) as checkpoints, unknown:
        checkpoints.restore(8, {})


def test_extra_that_json_cannot_hold_fails_at_once(tmp_path):
    with Checkpoints(tmp_path, CheckpointOptions()) as checkpoints, pytest.raises(TypeError):
        checkpoints.save(1, {"w": jnp.zeros(1)}, {"position": np.int64(3)})


@pytest.mark.parametrize("inner", ["", CHECKPOINTS])
def test_weights_of_another_run_onto_another_mesh(workdir, inner):
    state = make_state()
    spec = P("tensor")
    got, _ = restore_params(workdir / inner, None, abstract(state.params, mesh(4, 2), spec))
    assert_same(got, state.params)
    assert {leaf.sharding.spec for leaf in jax.tree.leaves(got) if leaf.ndim >= 2} == {spec}


def test_the_newest_weights_are_read_without_the_optimizer(tmp_path):
    num_bytes = 32 << 20
    state = {"params": {"w": jnp.arange(8.0)}, "opt_state": jax.random.bits(jax.random.key(0), (num_bytes // 4,))}
    with Checkpoints(tmp_path, CheckpointOptions()) as checkpoints:
        checkpoints.save(1, {**state, "params": {"w": jnp.zeros(8)}}, {})
        checkpoints.save(2, state, {})
    # Only the big array's data files are that big; without them nothing but the weights can be read.
    big = [path for path in tmp_path.rglob("*") if path.is_file() and path.stat().st_size > num_bytes // 64]
    assert sum(path.stat().st_size for path in big) > num_bytes // 2
    for path in big:
        path.write_bytes(b"")
    for step in (tmp_path / "1", tmp_path / "2"):  # as if it had been written so
        integrity.seal(step, 0, 1, lambda: False)
    wanted = abstract(state["params"], mesh(2, 4), P())
    assert_same(restore_params(tmp_path, None, wanted)[0], state["params"])


def test_weights_of_another_model_are_refused(workdir):
    wanted = abstract(make_state().params, mesh(2, 4), P())
    wanted["head"] = jax.ShapeDtypeStruct((8, 32), jnp.float32)
    with pytest.raises(UserError, match=r"params/head: not in the checkpoint"):
        restore_params(workdir, None, wanted)


def test_what_is_no_run_is_refused_saying_what_is_there(workdir, tmp_path):
    cases = {
        tmp_path / "nowhere": "nothing there",
        workdir / CHECKPOINTS / "7" / "_CHECKPOINT_METADATA": "a file",
        workdir / CHECKPOINTS / "7": f"nearest: {workdir / CHECKPOINTS}",
        tmp_path: "an empty directory",
    }
    for directory, what in cases.items():
        with pytest.raises(UserError) as caught:
            find(directory)
        assert what in str(caught.value)
        assert str(directory) in str(caught.value)
    (tmp_path / CHECKPOINTS).mkdir()
    with pytest.raises(UserError, match="an empty directory"):
        find(tmp_path)


def test_a_directory_that_cannot_be_made_is_the_users_mistake(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="allowed: a directory that can be written"):
        Checkpoints(tmp_path / "file" / CHECKPOINTS, CheckpointOptions())
