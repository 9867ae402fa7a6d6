"""Examples to global batches: one sample index decides everything, whatever the mesh and the number of processes.

Shapes: B batch_size (global), T sequence_length.

Sample g of a run is row g % B of step g // B, and example `order[g % E]` of epoch g // E, where E is the number of
examples and the order is drawn anew for each epoch. So the state of the data is one integer, the next sample index,
B * step; and nothing has to be replayed to go on from it.
"""

from collections.abc import Iterator, Mapping

import grain
import jax
import numpy as np

from meshtrain.data.packing import Example, Examples


def next_sample(step: int, batch_size: int) -> int:
    """Returns the whole state of the data before step `step`: the index of the next sample."""
    return step * batch_size


def sample_order(
    num_examples: int, *, seed: int, shuffle: bool = True, num_epochs: int | None = None
) -> grain.MapDataset[int]:
    """Returns which example each sample is, by the sample's index.

    Args:
      num_examples: how many examples an epoch has.
      seed: of the shuffle, 0 .. 2**32 - 1; each epoch is shuffled differently.
      shuffle: False keeps the examples' own order.
      num_epochs: None goes on for ever.
    """
    order = grain.MapDataset.range(num_examples)
    if shuffle and num_examples:
        # Grain draws epoch e from seed + e: hashed, a run's second epoch is not another run's first.
        order = order.shuffle(seed=int(np.random.SeedSequence(seed).generate_state(1)[0]))
    return order.repeat(num_epochs)


def _local_rows(sharding: jax.sharding.Sharding, shape: tuple[int, int]) -> np.ndarray:
    """Returns the rows of the batch that this process's devices hold, sorted, int64 [number of rows]."""
    held = np.zeros(shape[0], bool)
    for index in sharding.addressable_devices_indices_map(shape).values():
        assert index is not None
        held[index[0]] = True
    return np.flatnonzero(held)


def _global_arrays(
    local: Mapping[str, np.ndarray], rows: np.ndarray, batch_size: int, sharding: jax.sharding.Sharding
) -> dict[str, jax.Array]:
    """Returns global arrays [B, T] from this process's rows of them, each array [len(rows), T]."""

    def place(array: np.ndarray) -> jax.Array:
        def piece(index: tuple[slice, ...] | None) -> np.ndarray:
            assert index is not None
            wanted = np.arange(batch_size)[index[0]]
            # A device's rows are neighbours in the batch, so they are neighbours among the local rows.
            first = int(np.searchsorted(rows, wanted[0]))
            return array[first : first + len(wanted), index[1]]

        return jax.make_array_from_callback((batch_size, array.shape[1]), sharding, piece)

    return {name: place(array) for name, array in local.items()}


def _local_batch(examples: Examples, order: grain.MapDataset[int], first_sample: int, rows: np.ndarray) -> Example:
    """Returns this process's rows of one batch; rows behind the last sample are zero, so they weigh nothing."""
    samples = first_sample + rows
    found = [examples[order[int(sample)]] for sample in samples[samples < len(order)]]
    template = found[0] if found else examples[0]
    padding = [{name: np.zeros_like(array) for name, array in template.items()}] * (len(rows) - len(found))
    return {name: np.stack([example[name] for example in found + padding]) for name in template}


def batches(
    examples: Examples,
    *,
    batch_size: int,
    sharding: jax.sharding.Sharding,
    seed: int,
    start_step: int = 0,
    shuffle: bool = True,
    num_epochs: int | None = None,
    num_threads: int = 2,
    num_prefetch_batches: int = 4,
) -> Iterator[dict[str, jax.Array]]:
    """Yields global batches from step `start_step` on; each process reads only the rows that its devices hold.

    Reading starts at once, in threads. Close the iterator (`.close()`) to end them before it is exhausted.

    Args:
      examples: by number.
      batch_size: B, over all processes.
      sharding: of an array [B, T]; it must split B evenly.
      seed: of the order of the examples.
      start_step: how many batches came before.
      shuffle: False keeps the examples' own order.
      num_epochs: None goes on for ever. Else the last batch is filled up with rows of weight 0.
      num_threads: threads that read ahead; 0 reads when asked.
      num_prefetch_batches: batches held ready, on the host.

    Yields:
      A dict of tokens, targets, segment_ids, positions (int32 [B, T]) and weights (float32 [B, T]).
    """
    if not len(examples):
        return iter(())
    order = sample_order(len(examples), seed=seed, shuffle=shuffle, num_epochs=num_epochs)
    rows = _local_rows(sharding, (batch_size, len(examples[0]["tokens"])))
    steps = grain.MapDataset.range(-(-len(order) // batch_size))
    local_batches = steps.map(lambda step: _local_batch(examples, order, next_sample(step, batch_size), rows))
    options = grain.ReadOptions(num_threads=num_threads, prefetch_buffer_size=max(num_prefetch_batches, num_threads))
    iterator = iter(local_batches.to_iter_dataset(options))
    iterator.set_state({"next_index": min(start_step, len(local_batches))})
    iterator.start_prefetch()

    def place() -> Iterator[dict[str, jax.Array]]:
        try:
            for local in iterator:
                yield _global_arrays(local, rows, batch_size, sharding)
        finally:
            iterator.close()

    return place()
