"""Builds global batches from examples. The index of a sample determines its example, on any mesh and process count.

Shapes: B batch_size (global).

Sample g of a run is row g % B of the batch of step g // B. For E examples, it is example `order[g % E]` of epoch
g // E; each epoch has a new random order. In a mixture, the source of sample g depends on g and the weights, and each
source has separate epochs. So the state of the loader is one integer, the next sample index B * step, and a resumed run
does not repeat data.
"""

import functools
import hashlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Protocol, TypeAlias

import grain
import jax
import numpy as np
from jax.typing import DTypeLike

from meshtrain.data.packing import Parts
from meshtrain.errors import Problem, nearest, refuse

_NUM_HASHED_SAMPLES, _LEAST_HASHED_SAMPLES = 1024, 64
FromUser: TypeAlias = Any  # the unchecked result of a user's function, or a part of the result
# The abstract global batch: name -> shape [B, ...], dtype and sharding.
Batch = Mapping[str, jax.ShapeDtypeStruct]


class Shaped(Protocol):
    """An entry of the global batch: an array, or an abstract array such as `jax.ShapeDtypeStruct`."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The global shape, [B, ...]."""

    @property
    def dtype(self) -> DTypeLike:
        """The dtype of the elements."""


class Examples(Protocol):
    """Numbered examples, each a dict of NumPy arrays; several threads may read them at the same time."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Mapping[str, np.ndarray]: ...


def next_sample(step: int, batch_size: int) -> int:
    """Returns the index of the first sample of step `step`; this integer is the complete state of the loader."""
    return step * batch_size


def sample_order(
    num_examples: int, *, seed: int | Sequence[int], shuffle: bool = True, num_epochs: int | None = None
) -> grain.MapDataset[int]:
    """Returns a Grain dataset that maps the index of a sample to the number of its example.

    Args:
      num_examples: number of examples in an epoch.
      seed: the seed of the shuffle, one or several integers of 0 .. 2**32 - 1. Each epoch is shuffled differently.
      shuffle: whether to shuffle; False keeps the order of the examples.
      num_epochs: number of epochs; None repeats forever.
    """
    order = grain.MapDataset.range(num_examples)
    if shuffle and num_examples:
        # Grain shuffles epoch e with seed + e. Hashing the seed keeps epochs of runs with neighbouring seeds different.
        order = order.shuffle(seed=int(np.random.SeedSequence(seed).generate_state(1)[0]))
    return order.repeat(num_epochs)


@functools.cache
def turns(weights: tuple[int, ...]) -> np.ndarray:
    """Returns the index of the source for each sample in one period of a mixture, int32 [sum(weights)].

    Let s be a source's share of all samples. After every sample, the number of samples from this source differs from s
    times the number of all samples by less than one. Sample n of the source, counted from 1, may be at any position p
    with floor((n - 1) / s) <= p < ceil(n / s). Of all sources whose next sample may be at the current position, the
    source with the smallest upper bound of p is chosen. Reference: Tijdeman, The chairman assignment problem, 1980.
    Grain's `MapDataset.mix` rounds weights, so that 7 : 3 becomes 233 : 100, and may deviate by two samples with three
    sources.

    Args:
      weights: number of samples of each source in a period, positive integers without a common divisor.
    """
    total, had, result = sum(weights), [0] * len(weights), list[int]()
    ends = [-(-total // weight) for weight in weights]
    for place in range(total):
        ready = (one for one, weight in enumerate(weights) if had[one] * total < weight * (place + 1))
        source = min(ready, key=ends.__getitem__)
        had[source] += 1
        ends[source] = -(-(had[source] + 1) * total // weights[source])
        result.append(source)
    return np.asarray(result, np.int32)


def samples_per_source(weights: tuple[int, ...], num_samples: int) -> np.ndarray:
    """Returns how many of the first `num_samples` samples of a mixture come from each source, int64 [sources].

    Args:
      weights: number of samples of each source in a period of the mixture.
      num_samples: number of samples since the start of the run.
    """
    periods, rest = divmod(num_samples, sum(weights))
    return periods * np.asarray(weights) + np.bincount(turns(weights)[:rest], minlength=len(weights))


def mixture_order(mixture: Parts, *, seed: int) -> grain.MapDataset[int]:
    """Returns an infinite Grain dataset that maps the index of a sample of a mixture to the number of its example.

    Each source is shuffled separately.

    Args:
      mixture: the sources, with weights.
      seed: the seed of the run.
    """
    sizes, pattern = [len(part) for part in mixture.parts.values()], turns(mixture.weights)
    orders = [sample_order(size, seed=(seed, source)) for source, size in enumerate(sizes)]
    before = np.empty(len(pattern), np.int64)  # number of earlier samples of the same source in the pattern
    for source, weight in enumerate(mixture.weights):
        before[pattern == source] = np.arange(weight)

    def example(sample: int) -> int:
        period, place = divmod(sample, len(pattern))
        source = int(pattern[place])
        return int(mixture.starts[source]) + orders[source][period * mixture.weights[source] + int(before[place])]

    return grain.MapDataset.range(sys.maxsize).map(example)


def order_of(
    examples: Examples, *, seed: int, shuffle: bool = True, num_epochs: int | None = None
) -> grain.MapDataset[int]:
    """Returns a Grain dataset that maps the index of a sample of a run to the number of its example.

    Args:
      examples: the examples; a mixture if they are `Parts` with weights.
      seed: the seed of the shuffle.
      shuffle: whether to shuffle; a mixture is always shuffled.
      num_epochs: number of epochs; None repeats forever, as a mixture always does.
    """
    if isinstance(examples, Parts) and examples.weights:
        return mixture_order(examples, seed=seed)
    return sample_order(len(examples), seed=seed, shuffle=shuffle, num_epochs=num_epochs)


def order_hash(examples: Examples, *, seed: int, first_sample: int) -> str:
    """Returns a hexadecimal hash of the example numbers of up to 1,024 samples, starting with `first_sample`.

    The processes of a run compare their hashes, so that all of them read the same data in the same order.

    Args:
      examples: the examples; a mixture if they are `Parts` with weights.
      seed: the seed of the shuffle.
      first_sample: index of the first sample to include.
    """
    order = order_of(examples, seed=seed)
    # Grain takes a millisecond for a sample of a small data set, whose epochs are short.
    count = min(_NUM_HASHED_SAMPLES, _LEAST_HASHED_SAMPLES + len(examples))
    numbers = [int(order[sample]) for sample in range(first_sample, first_sample + count)]
    return hashlib.sha256(repr(numbers).encode()).hexdigest()


def content_hash(examples: Examples) -> str:
    """Returns a hexadecimal hash of the contents of the first, middle and last example.

    Returns '' if an example differs when it is read a second time, for example because of random noise.
    """
    digest = hashlib.sha256()
    for number in sorted({0, len(examples) // 2, len(examples) - 1} if len(examples) else ()):
        first, second = ([*map(_hash, sorted(examples[number].items()))] for _ in range(2))
        if first != second:  # a source may add noise to its examples
            return ""
        digest.update(repr(first).encode())
    return digest.hexdigest()


def _hash(entry: tuple[str, np.ndarray]) -> tuple[str, str, str]:
    name, array = entry[0], np.ascontiguousarray(entry[1])
    content = b"" if array.dtype == object else array.tobytes()
    return name, f"{array.dtype}{array.shape}", hashlib.sha256(content).hexdigest()


def example_problems(
    example: FromUser, batch: Mapping[str, Shaped], limits: Mapping[str, int], where: str
) -> list[Problem]:
    """Returns an error line for each batch entry that is missing in an example or has a wrong shape, dtype or range.

    Args:
      example: name -> array without the batch dim; entries that `batch` lacks are ignored.
      batch: name -> entry of the global batch, an object with shape [B, ...] and dtype.
      limits: name -> the exclusive upper bound of the integers in this entry; the lower bound is 0.
      where: the name of the example in the error lines, such as `example 3`.
    """
    if not isinstance(example, Mapping):
        entries = ", ".join(f"'{name}': array" for name in batch)
        return [Problem(where, got=type(example).__name__, allowed="a dict of arrays", nearest=f"{{{entries}}}")]
    problems = []
    for name, entry in batch.items():
        shape, dtype = tuple(entry.shape[1:]), np.dtype(entry.dtype)
        wanted = f"{list(shape)} {dtype.name}"
        if name not in example:
            problems.append(
                Problem(
                    where,
                    got=f"no entry '{name}'",
                    allowed=f"{', '.join(batch)}, here {wanted}",
                    fix=nearest(name, example.keys() - batch.keys()),
                    nearest=f"add {name!r}",
                )
            )
            continue
        got = np.asarray(example[name])
        if (got.shape, got.dtype) != (shape, dtype):
            fix = f"{name}.astype(np.{dtype.name})" if got.shape == shape else f"an array {wanted}"
            problems.append(
                Problem(
                    where,
                    got=f"{list(got.shape)} {got.dtype.name} for '{name}'",
                    allowed=f"{wanted}, see Task.batch",
                    nearest=fix,
                )
            )
        elif name in limits and got.size and not 0 <= (wrong := _furthest(got)) < limits[name]:
            near = 0 if wrong < 0 else limits[name] - 1
            problems.append(
                Problem(
                    where,
                    got=f"{wrong} in '{name}'",
                    allowed=f"0 to {limits[name] - 1}, see Task.batch",
                    nearest=near,
                )
            )
    return problems


def _furthest(array: np.ndarray) -> int:
    """Returns the element of an integer array to compare with its bounds: the minimum if negative, else the maximum."""
    least = int(array.min())
    return least if least < 0 else int(array.max())


def _local_rows(sharding: jax.sharding.Sharding, shape: tuple[int, ...]) -> np.ndarray:
    """Returns the indices of the batch rows that this process's devices store, sorted, int64 [number of rows].

    Args:
      sharding: the sharding of an entry of the global batch.
      shape: the global shape of this entry, [B, ...].
    """
    held = np.zeros(shape[0], bool)
    for index in sharding.addressable_devices_indices_map(shape).values():
        assert index is not None
        held[index[0]] = True
    return np.flatnonzero(held)


def _global_arrays(local: Mapping[str, np.ndarray], batch: Batch) -> dict[str, jax.Array]:
    """Creates the global arrays [B, ...] of a batch from the rows of each process.

    Args:
      local: name -> array of this process's rows, [number of rows, ...].
      batch: name -> shape, dtype and sharding of the global array.
    """
    return {
        name: jax.make_array_from_process_local_data(entry.sharding, local[name], entry.shape)
        for name, entry in batch.items()
    }


def _local_batch(
    examples: Examples,
    order: grain.MapDataset[int],
    first_sample: int,
    rows: np.ndarray,
    batch: Batch,
    limits: Mapping[str, int],
) -> dict[str, np.ndarray]:
    """Reads this process's rows of one batch; rows after the last sample are zero, so their weight is 0.

    Args:
      examples: the examples of the run.
      order: maps the index of a sample to the number of its example.
      first_sample: index of the sample in row 0 of the global batch.
      rows: sorted indices in the global batch of this process's rows, int64.
      batch: name -> shape, dtype and sharding of the global array.
      limits: name -> the exclusive upper bound of the integers in this entry.

    Returns:
      name -> array [number of rows, ...].

    Raises:
      UserError: an example does not fit the batch.
    """
    samples = first_sample + rows
    local = {name: np.zeros((len(rows), *entry.shape[1:]), entry.dtype) for name, entry in batch.items()}
    for row, sample in enumerate(samples[samples < len(order)]):
        number = order[int(sample)]
        example = examples[number]
        refuse(example_problems(example, batch, limits, f"example {number}"))
        for name, array in local.items():
            array[row] = example[name]
    return local


def batches(
    examples: Examples,
    *,
    batch: Batch,
    limits: Mapping[str, int] = MappingProxyType({}),
    seed: int,
    start_step: int = 0,
    end_step: int = 0,
    shuffle: bool = True,
    num_epochs: int | None = None,
    num_threads: int = 2,
    num_prefetch_batches: int = 4,
) -> Iterator[dict[str, jax.Array]]:
    """Yields global batches from step `start_step` on; each process reads only the rows for its own devices.

    Background threads start to read immediately. To stop them before the iterator is exhausted, call its `.close()`.

    Args:
      examples: numbered examples. Each is a dict of NumPy arrays with the batch's entries, without the batch dim.
      batch: name -> shape [B, ...], dtype and sharding of each entry of the global batch. All entries must split B in
        the same way, evenly.
      limits: name -> the exclusive upper bound of the integers in this entry.
      seed: the seed of the order of the examples.
      start_step: the step of the first batch that is yielded.
      end_step: the step after the last batch, so that no later batch is read ahead; 0 for no end.
      shuffle: whether to shuffle; False keeps the order of the examples.
      num_epochs: number of epochs; None repeats forever. Otherwise the last batch is padded with rows of zeros, which
        have weight 0.
      num_threads: number of threads that read ahead; 0 reads each batch when it is requested.
      num_prefetch_batches: maximum number of batches that are read ahead into host memory.

    Yields:
      A dict of global arrays with the shapes, dtypes and shardings of `batch`.

    Raises:
      UserError: an example does not fit the batch; raised when the batch with this example is requested.
    """
    if not len(examples):
        return iter(())
    order = order_of(examples, seed=seed, shuffle=shuffle, num_epochs=num_epochs)
    first = next(iter(batch.values()))
    batch_size, rows = first.shape[0], _local_rows(first.sharding, first.shape)
    steps = grain.MapDataset.range(min(-(-len(order) // batch_size), end_step or sys.maxsize))
    local_batches = steps.map(
        lambda step: _local_batch(examples, order, next_sample(step, batch_size), rows, batch, limits)
    )
    options = grain.ReadOptions(num_threads=num_threads, prefetch_buffer_size=max(num_prefetch_batches, num_threads))
    iterator = iter(local_batches.to_iter_dataset(options))
    iterator.set_state({"next_index": min(start_step, len(local_batches))})
    iterator.start_prefetch()

    def place() -> Iterator[dict[str, jax.Array]]:
        try:
            yield from (_global_arrays(local, batch) for local in iterator)
        finally:
            iterator.close()

    return place()
