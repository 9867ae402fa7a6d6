"""A checkpoint in a bucket is as whole, as damaged and as kept as on a disk; a server of another process answers."""

import json
import threading

import fsspec
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from meshtrain import verify
from meshtrain.checkpoint import integrity, other_runs, owner, retention
from meshtrain.checkpoint.checkpoint import Checkpoints
from meshtrain.checkpoint.retention import CheckpointOptions
from meshtrain.errors import EXIT_LOST_PEER, SaveFailed, UserError
from meshtrain.run import saving
from meshtrain.store import buckets

VALUES = np.arange(64 * 64, dtype=np.float32).reshape(64, 64)


SPEC = P("data", "tensor")


def state(step, spec=SPEC):
    mesh = jax.make_mesh((2, 4), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
    weight = jax.device_put(VALUES + step, NamedSharding(mesh, spec))
    return {"step": jnp.int32(step), "params": {"w": weight, "scale": jnp.ones(3, jnp.bfloat16)}}


def abstract(tree):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree)


@pytest.fixture
def objects(bucket):
    """The client of the bucket: name below the prefix -> bytes."""
    return Objects(bucket)


class Objects:
    """What somebody else does to a bucket."""

    def __init__(self, prefix):
        self.prefix, self.client = prefix, fsspec.filesystem("gcs", use_listings_cache=False)

    def names(self):
        return {name.removeprefix(f"{self.prefix[5:]}/") for name in self.client.find(self.prefix)}

    def __getitem__(self, name):
        return self.client.cat_file(f"{self.prefix}/{name}")

    def __setitem__(self, name, content):
        self.client.pipe_file(f"{self.prefix}/{name}", content)

    def __delitem__(self, name):
        self.client.rm_file(f"{self.prefix}/{name}")

    def largest(self, step):
        return max((one for one in self.names() if one.startswith(f"{step}/state/")), key=lambda one: len(self[one]))


def save(bucket, *steps, **options):
    with Checkpoints(bucket, CheckpointOptions(**options)) as checkpoints:
        for step in steps:
            assert checkpoints.save(step, state(step), {"config": {"seed": step}})
            checkpoints.wait()
        assert not checkpoints.save(steps[-1], state(steps[-1]), {}), "it already exists"


def test_comes_back_bitwise_on_another_mesh_and_is_kept_as_options_say(bucket, objects):
    save(bucket, 1, 2, 3, 4, 5, keep_last=2, keep_every=3)
    wanted = abstract(state(5, P(None, "data")))
    with Checkpoints(bucket, None) as checkpoints:
        assert checkpoints.steps() == [3, 4, 5]
        got = checkpoints.restore(5, wanted)
    assert got["params"]["w"].sharding == wanted["params"]["w"].sharding
    assert np.array_equal(got["params"]["w"], VALUES + 5)
    assert {name.split("/")[0] for name in objects.names()} == {"3", "4", "5"}
    assert other_runs.extra_of_newest(bucket) == {"config": {"seed": 5}}
    with Checkpoints(bucket, None) as checkpoints:
        assert checkpoints.steps() == [3, 4, 5]
        del objects["5/manifest.json"]
        assert checkpoints.steps() == [3, 4], "what others do is seen at once"
    assert other_runs.extra_of_newest(bucket) == {"config": {"seed": 4}}


def test_the_best_are_kept(bucket):
    with Checkpoints(bucket, CheckpointOptions(keep_last=1, keep_best=1)) as checkpoints:
        for step, loss in ((1, 3.0), (2, 1.0), (3, 2.0), (4, 2.5)):
            checkpoints.save(step, state(step), {})
            checkpoints.rate(step, {"eval_loss": loss})
    assert retention.checkpoint_steps(buckets.place(bucket)) == [2, 4]


def test_the_seal_is_the_listing_and_reads_nothing_back(bucket, objects, monkeypatch):
    monkeypatch.setattr(integrity, "_sha256", None)
    save(bucket, 1)
    entries = json.loads(objects["1/manifest.json"])["files"]
    assert {f"1/{name}" for name in entries} == objects.names() - {"1/manifest.json"}
    assert all(
        entry["bytes"] == len(objects[f"1/{name}"]) and len(entry["crc32c"]) == 8 for name, entry in entries.items()
    )


def flipped(content):
    return content[: len(content) // 2] + bytes([content[len(content) // 2] ^ 1]) + content[len(content) // 2 + 1 :]


def test_damaged_ones_are_set_aside_and_the_one_before_them_used(bucket, objects, capsys):
    save(bucket, 1, 2, 3, 4, 5, 6, 7, keep_last=7)
    objects[name] = flipped(objects[name := objects.largest(2)])
    objects[name] = objects[name := objects.largest(3)][:-1]
    del objects[objects.largest(4)]
    del objects["5/manifest.json"]
    objects["6/manifest.json"] = objects["6/manifest.json"][:-9]
    del objects[f"7/{buckets.COMMITTED}"]
    before = {name: objects[name] for name in objects.names() if not name.startswith("1/")}
    assert verify.main([bucket]) == 1
    out = capsys.readouterr().out
    assert all(f"{bucket}/{step}: {'damaged: ' if step > 1 else 'undamaged'}" in out for step in range(1, 8))
    with Checkpoints(bucket, None) as checkpoints:
        step, lines = checkpoints.newest_whole()
    assert step == 1
    assert all(
        line.startswith(f"checkpoint {bucket}/{step}: ") for line, step in zip(lines, range(7, 1, -1), strict=True)
    )
    assert before.keys() < objects.names(), "a reader moves nothing"
    with Checkpoints(bucket, CheckpointOptions()) as checkpoints:
        assert checkpoints.newest_whole() == (1, lines)
        assert checkpoints.steps() == [1]
        assert checkpoints.save(2, state(2), {}), "its place is free again"
    assert {name: objects[f"damaged/{name}"] for name in before} == before
    assert verify.main([bucket]) == 0


def test_a_half_written_and_a_half_deleted_one_are_swept(bucket, objects, monkeypatch):
    save(bucket, 1, 2)
    for name in ("manifest.json", buckets.COMMITTED):
        del objects[f"2/{name}"]  # as after a kill, before the last objects are written, or after the first deletions
    with Checkpoints(bucket, CheckpointOptions()) as checkpoints:
        assert checkpoints.newest_whole() == (1, [])
    assert {name.split("/")[0] for name in objects.names()} == {"1"}


def test_of_all_damaged_ones_none_is_moved(bucket, objects):
    save(bucket, 1)
    objects["1/manifest.json"] = b"{}"
    with (
        Checkpoints(bucket, CheckpointOptions()) as checkpoints,
        pytest.raises(UserError, match="got no undamaged checkpoint"),
    ):
        checkpoints.newest_whole()
    assert "1/manifest.json" in objects.names()


def test_a_copy_of_a_disk_s_checkpoint_is_refused_as_one(bucket, objects, tmp_path):
    save(tmp_path, 1)
    for path in (path for path in tmp_path.rglob("*") if path.is_file()):
        objects[path.relative_to(tmp_path).as_posix()] = path.read_bytes()
    assert "copied between a disk and a bucket" in integrity.damage(buckets.place(bucket) / "1")[0]


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("gs://missing/run", "got no bucket with this name; .*; nearest: gcloud storage buckets create gs://missing$"),
        ("gs://private/run", r"got no credentials \(the caller has no access .*\); .*; nearest: gcloud auth"),
    ],
)
def test_a_bucket_that_cannot_be_listed_is_one_line(bucket_server, url, said, caplog, capfd):
    with pytest.raises(UserError, match=said) as caught:
        Checkpoints(url, None)
    assert len(caught.value.problems) == 1
    assert str(caught.value).startswith(f"{url}: ")
    assert "\n" not in str(caught.value)
    assert not caplog.records
    assert capfd.readouterr() == ("", "")


def test_without_the_package_it_is_one_line(monkeypatch):
    monkeypatch.setattr(buckets.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        UserError, match="gs://runs/one: got a bucket; allowed: with the extra 'gcs'; nearest: pip install"
    ):
        Checkpoints("gs://runs/one", None)


def test_without_rights_to_write_a_save_fails_in_one_line(bucket_server):
    said = pytest.raises(SaveFailed, match=r"^checkpoint gs://readonly/run/1: not written: .*Forbidden.*$")
    with Checkpoints("gs://readonly/run", CheckpointOptions()) as checkpoints, said:
        _ = checkpoints.save(1, state(1), {}), checkpoints.wait()


@pytest.mark.slow
@pytest.mark.long
def test_a_network_that_is_gone_delays_a_save_and_after_minutes_fails_it_alone(
    bucket_server, bucket, monkeypatch, capsys
):
    with Checkpoints(bucket, CheckpointOptions()) as checkpoints:
        with bucket_server.gone(after_seconds=45):
            checkpoints.save(1, state(1), {})
        checkpoints.wait()
        [line] = capsys.readouterr().err.splitlines()
        assert line.startswith("meshtrain: WARNING: a bucket does not answer (")
        monkeypatch.setattr(buckets, "_ROUNDS", 0)  # as after minutes
        with bucket_server.gone(after_seconds=45):
            with pytest.raises(SaveFailed, match="/2: not written: "):
                checkpoints.save(2, state(2), {})
            with pytest.raises(SaveFailed, match="; the same command resumes from "):
                saving.finish(checkpoints)
        assert checkpoints.save(3, state(3), {})
        saving.finish(checkpoints)
        assert checkpoints.newest_whole() == (3, [])


def test_an_owner_who_was_taken_over_leaves_at_once(bucket, monkeypatch):
    said, left = [], threading.Event()

    def leave(code, line):
        said.append((code, line))
        left.set()
        raise buckets.Unreached("it has left")

    monkeypatch.setattr(owner, "_BEAT_SECONDS", 0.05)
    monkeypatch.setattr(owner, "leave_at_once", leave)
    with owner.own_folder(bucket, "mine"):
        first = owner._owner(buckets.place(bucket))
        while (beat := owner._owner(buckets.place(bucket)))["seconds"] == first["seconds"]:
            pass
        assert beat["run"] == "mine"
        buckets.write(buckets.place(bucket) / owner.OWNER, json.dumps(beat | {"run": "other", "host": "far"}))
        assert left.wait(20)
    assert said[0] == (EXIT_LOST_PEER, f"meshtrain: lost: {bucket} was taken over by far")


def test_an_owner_is_read_whole_while_it_is_replaced(bucket):
    place, is_over = buckets.place(bucket), threading.Event()

    def replace():
        while not is_over.is_set():
            for run in ("x", "x" * 50):
                buckets.write(place / owner.OWNER, owner._text(run))

    writer = threading.Thread(target=replace)
    buckets.write(place / owner.OWNER, owner._text("x"))
    writer.start()
    seen = {owner._owner(place).get("run") for _ in range(100)}
    is_over.set()
    writer.join()
    assert seen == {"x", "x" * 50}


def test_of_two_that_begin_at_once_one_is_let_through(bucket, monkeypatch):
    monkeypatch.setattr(owner, "_owner", lambda place: {})  # both look before either has written
    with (
        owner.own_folder(bucket, "one"),
        pytest.raises(UserError, match="where another run is starting"),
        owner.own_folder(bucket, "two"),
    ):
        pass
