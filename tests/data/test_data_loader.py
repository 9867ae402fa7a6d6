import dataclasses
import itertools
import threading

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from meshtrain.data import loader
from meshtrain.data.loader import batches, mixture_order, next_sample, sample_order, samples_per_source, turns
from meshtrain.data.packing import Parts
from meshtrain.errors import UserError

LENGTH = 4


@dataclasses.dataclass(frozen=True)
class Numbered:
    """Examples whose tokens say which example they are, and which note that they were read."""

    num_examples: int
    read: list = dataclasses.field(default_factory=list)
    start: int = 0

    def __len__(self):
        return self.num_examples

    def __getitem__(self, index):
        if not 0 <= index < self.num_examples:
            raise IndexError(index)
        self.read.append(int(index))
        tokens = np.arange(LENGTH, dtype=np.int32) + 10 * np.int32(self.start + index)
        same = dict.fromkeys(("targets", "segment_ids", "positions"), np.ones(LENGTH, np.int32))
        return {"tokens": tokens, **same, "weights": np.ones(LENGTH, np.float32)}

    def pairs(self):
        raise NotImplementedError


def sharded(data=8, sequence=1, spec=None, num_devices=8):
    mesh = jax.make_mesh(
        (data, sequence), ("data", "sequence"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:num_devices]
    )
    return NamedSharding(mesh, P("data", "sequence") if spec is None else spec)


def batch_on(sharding, batch_size=8):
    """The abstract batch of `Numbered` examples."""
    shape, ints = (batch_size, LENGTH), ("tokens", "targets", "segment_ids", "positions")
    dtypes = dict.fromkeys(ints, np.int32) | {"weights": np.float32}
    return {name: jax.ShapeDtypeStruct(shape, dtype, sharding=sharding) for name, dtype in dtypes.items()}


def drawn(examples, count=None, *, sharding=None, **options):
    options = {"batch": batch_on(sharding or sharded()), "seed": 3} | options
    iterator = batches(examples, **options)
    found = [jax.device_get(batch) for batch in itertools.islice(iterator, count)]
    if hasattr(iterator, "close"):
        iterator.close()
    return found


def numbers(found):
    """Which example stands in each row, -1 for padding."""
    return [np.where(batch["weights"][:, 0] > 0, batch["tokens"][:, 0] // 10, -1).tolist() for batch in found]


def test_each_epoch_holds_every_example_once_in_another_order():
    flat = sum(numbers(drawn(Numbered(20), 10)), [])  # noqa: RUF017 - ten short lists
    epochs = [flat[start : start + 20] for start in range(0, 80, 20)]
    for epoch in epochs:
        assert sorted(epoch) == list(range(20))
    assert len({tuple(epoch) for epoch in epochs}) == 4
    assert epochs[0] != sorted(epochs[0])


def test_seeds_differ_in_every_epoch():
    first, second = (sample_order(50, seed=seed) for seed in (3, 4))
    epochs = {tuple(order[e * 50 + i] for i in range(50)) for order in (first, second) for e in range(3)}
    assert len(epochs) == 6


def test_unshuffled_keeps_the_order():
    assert numbers(drawn(Numbered(12), 3, shuffle=False)) == [
        [0, 1, 2, 3, 4, 5, 6, 7],
        [8, 9, 10, 11, 0, 1, 2, 3],
        [4, 5, 6, 7, 8, 9, 10, 11],
    ]


@pytest.mark.parametrize("num_threads", [0, 1, 4])
@pytest.mark.parametrize("start_step", [1, 5, 17])
def test_resumes_exactly(start_step, num_threads):
    whole = numbers(drawn(Numbered(20), 20))
    assert (
        numbers(drawn(Numbered(20), 20 - start_step, start_step=start_step, num_threads=num_threads))
        == whole[start_step:]
    )


def test_resuming_reads_nothing_that_came_before():
    examples = Numbered(10_000)
    order = sample_order(10_000, seed=3)
    drawn(examples, 1, start_step=700, num_threads=0)
    first = next_sample(700, 8)
    assert examples.read[-8:] == [order[first + row] for row in range(8)]
    assert len(examples.read) <= 10


SHARDINGS = {
    "one device": lambda: sharded(1, 1, num_devices=1),
    "data": sharded,
    "data x sequence": lambda: sharded(4, 2),
    "sequence": lambda: sharded(2, 4, P(None, "sequence")),
    "both axes on the batch": lambda: sharded(4, 2, P(("data", "sequence"))),
    "reversed axes": lambda: sharded(4, 2, P(("sequence", "data"), None)),
    "replicated": lambda: sharded(8, 1, P()),
}


def alone():
    return Numbered(30)


def mixed():
    """Three sources, of examples 0 to 11, 12 to 16, and 17 to 29."""
    return Parts({"a": Numbered(12), "b": Numbered(5, start=12), "c": Numbered(13, start=17)}, (5, 3, 1))


@pytest.mark.parametrize("examples", [alone, mixed])
@pytest.mark.parametrize("make", SHARDINGS.values(), ids=SHARDINGS)
def test_the_mesh_changes_nothing_but_where_rows_lie(make, examples):
    wanted = drawn(examples(), 5, sharding=sharded(1, 1, num_devices=1))
    sharding = make()
    iterator = batches(examples(), batch=batch_on(sharding), seed=3)
    for expected in wanted:
        batch = next(iterator)
        assert set(batch) == {"tokens", "targets", "segment_ids", "positions", "weights"}
        for name, array in batch.items():
            assert array.shape == (8, LENGTH)
            assert array.sharding == sharding
            assert np.array_equal(array, expected[name])
    iterator.close()


@dataclasses.dataclass(frozen=True)
class OneProcess:
    """The part of a sharding that one of several processes sees."""

    whole: NamedSharding
    devices: tuple

    def addressable_devices_indices_map(self, shape):
        indices = self.whole.devices_indices_map(shape)
        return {device: indices[device] for device in self.devices}


@pytest.mark.parametrize("spec", [P("data"), P(("sequence", "data")), P(None, "sequence"), P()])
@pytest.mark.parametrize("num_processes", [1, 2, 4])
@pytest.mark.parametrize("examples", [alone, mixed])
def test_each_process_reads_its_own_rows_of_the_same_batch(spec, num_processes, examples):
    whole = sharded(4, 2, spec)
    order = mixture_order(mixed(), seed=3) if examples is mixed else sample_order(30, seed=3)
    [wanted] = drawn(examples(), 1, start_step=2)
    for devices in np.array_split(np.asarray(jax.devices()), num_processes):
        process = OneProcess(whole, tuple(devices))
        rows = loader._local_rows(process, (8, LENGTH))
        held = {
            row for index in process.addressable_devices_indices_map((8, LENGTH)).values() for row in range(8)[index[0]]
        }
        assert rows.tolist() == sorted(held)
        data = examples()
        local = loader._local_batch(data, order, next_sample(2, 8), rows, batch_on(whole), {})
        assert np.array_equal(local["tokens"], wanted["tokens"][rows])
        sources = [data] if examples is alone else data.parts.values()
        assert sum(len(source.read) for source in sources) == len(rows)


WEIGHTS = [(1,), (1, 1), (7, 3), (14, 5, 1), (1, 1, 1, 1), (99, 1), (40, 30, 20, 5, 3, 1, 1), (467, 401, 89, 31, 7, 2)]


@pytest.mark.parametrize("weights", WEIGHTS, ids=str)
def test_at_every_sample_each_source_is_less_than_one_sample_away_from_its_share(weights):
    num_samples = 3 * sum(weights)
    sources = [int(turns(weights)[sample % sum(weights)]) for sample in range(num_samples)]
    had = np.cumsum(np.asarray(sources)[:, None] == np.arange(len(weights)), axis=0)
    shares = np.asarray(weights) * np.arange(1, num_samples + 1)[:, None]
    assert np.abs(had * sum(weights) - shares).max() < sum(weights)
    for sample in range(0, num_samples, 7):
        assert samples_per_source(weights, sample + 1).tolist() == had[sample].tolist()


def test_shares_do_not_drift():
    """10^15 samples: 7 : 3 rounded to hundredths of the smaller would be off by 3 * 10^11."""
    assert samples_per_source((7, 3), 10**15).tolist() == [7 * 10**14, 3 * 10**14]


def test_a_mixture_takes_each_source_in_epochs_of_its_own():
    mixture, num_samples = mixed(), 9 * 13 * 2
    order = mixture_order(mixture, seed=3)
    samples = [order[sample] for sample in range(num_samples)]
    assert samples_per_source(mixture.weights, num_samples).tolist() == [130, 78, 26]
    sources = ((0, 12), (12, 5), (17, 13))
    for first, size in sources:
        own = [number for number in samples if first <= number < first + size]
        epochs = [own[start : start + size] for start in range(0, len(own) - size + 1, size)]
        assert all(sorted(epoch) == list(range(first, first + size)) for epoch in epochs)
        assert len({tuple(epoch) for epoch in epochs}) > 1
    far = [order[10**12 + sample] for sample in range(90)]
    assert [sum(first <= one < first + size for one in far) for first, size in sources] == [50, 30, 10]
    assert [mixture_order(mixture, seed=4)[sample] for sample in range(90)] != samples[:90]


@pytest.mark.parametrize("start_step", [1, 5, 17])
def test_a_mixture_resumes_exactly(start_step):
    whole = numbers(drawn(mixed(), 20))
    assert numbers(drawn(mixed(), 20 - start_step, start_step=start_step)) == whole[start_step:]


def test_the_last_batch_of_an_evaluation_is_filled_with_nothing():
    found = drawn(Numbered(11), shuffle=False, num_epochs=1)
    assert numbers(found) == [[0, 1, 2, 3, 4, 5, 6, 7], [8, 9, 10, -1, -1, -1, -1, -1]]
    assert all((array[3:] == 0).all() for array in found[1].values())
    assert sum(batch["weights"].sum() for batch in found) == 11 * LENGTH


def test_fewer_examples_than_rows():
    assert numbers(drawn(Numbered(3), shuffle=False, num_epochs=1)) == [[0, 1, 2, -1, -1, -1, -1, -1]]
    [first] = numbers(drawn(Numbered(3), 1))
    assert sorted(first[:3]) == sorted(first[3:6]) == [0, 1, 2]
    assert numbers(drawn(Numbered(1), 2)) == [[0] * 8] * 2
    assert drawn(Numbered(0), 1) == []


def test_nothing_is_left_behind_the_end():
    assert drawn(Numbered(16), num_epochs=2, start_step=4) == []
    assert drawn(Numbered(16), num_epochs=2, start_step=9) == []
    assert len(drawn(Numbered(16), num_epochs=2, start_step=3)) == 1


class Images:
    """Images [H, W, C], all pixels different, with a label and an entry that no batch has."""

    def __len__(self):
        return 20

    def __getitem__(self, index):
        image = 100 * index + np.arange(72.0).reshape(4, 6, 3)
        return {"images": image.astype(np.float32), "labels": np.int32(index), "file": np.array("name")}


def test_batches_of_rank_4_are_split_over_any_of_their_dims():
    by_row, by_label = sharded(2, 4, P("data", None, None, None)), sharded(2, 4, P("data"))
    by_width = sharded(2, 2, P("data", None, "sequence", None), num_devices=4)
    labels = jax.ShapeDtypeStruct((8,), np.int32, sharding=by_label)
    for sharding in (by_row, by_width):
        images = jax.ShapeDtypeStruct((8, 4, 6, 3), np.float32, sharding=sharding)
        [first, *_] = drawn(Images(), 2, batch={"images": images, "labels": labels}, shuffle=False)
        assert set(first) == {"images", "labels"}
        assert first["labels"].tolist() == list(range(8))
        np.testing.assert_array_equal(first["images"], np.stack([Images()[index]["images"] for index in range(8)]))


def test_an_example_that_does_not_fit_is_named_with_all_that_is_wrong():
    class Wrong(Numbered):
        def __getitem__(self, index):
            example = super().__getitem__(index)
            if index == 13:
                example["tokens"] = example["tokens"].astype(np.int64)
                example["target"] = example.pop("targets")
                example["weights"] = example["weights"][:-1]
            return example

    drawn(Wrong(13), shuffle=False, num_epochs=1)
    with pytest.raises(UserError) as caught:
        drawn(Wrong(16), shuffle=False, num_epochs=1)
    tokens, targets, weights = caught.value.problems
    assert tokens.startswith("example 13: got [4] int64 for 'tokens'; allowed: [4] int32")
    assert tokens.endswith("nearest: tokens.astype(np.int32)")
    assert "got no entry 'targets'; " in targets
    assert targets.endswith("did you mean 'target'?")
    assert "got [3] float32 for 'weights'; allowed: [4] float32" in weights


def test_an_error_while_reading_ahead_arrives():
    class Broken(Numbered):
        def __getitem__(self, index):
            if index == 13:
                raise OSError("disk")
            return super().__getitem__(index)

    with pytest.raises(OSError, match="disk"):
        drawn(Broken(16), shuffle=False, num_epochs=1)


def test_nothing_is_read_beyond_the_last_step():
    read = []

    class Watched(Numbered):
        def __getitem__(self, index):
            read.append(index)
            return super().__getitem__(index)

    found = batches(Watched(1000), batch=batch_on(sharded()), seed=0, start_step=2, end_step=5, num_prefetch_batches=8)
    assert len(list(found)) == 3
    assert len(read) == 3 * 8


def test_closing_ends_the_threads():
    iterator = batches(Numbered(1000), batch=batch_on(sharded()), seed=0, num_threads=3)
    next(iterator)
    mine = [thread for thread in threading.enumerate() if thread.name.startswith("grain-prefetch")]
    assert mine
    iterator.close()
    for thread in mine:
        thread.join(timeout=10)
    assert not any(thread.is_alive() for thread in mine)


def test_an_id_out_of_range_is_named_when_its_batch_is_due():
    examples = Numbered(8)  # the tokens of example 7 are 70 .. 73
    assert drawn(examples, 1, limits={"tokens": 74})
    with pytest.raises(UserError, match=r"^example 7: got 73 in 'tokens'; allowed: 0 to 72, .*; nearest: 72"):
        drawn(examples, 1, limits={"tokens": 73})
