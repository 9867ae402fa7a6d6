"""Sums gradients over microbatches in float32, and reduces them across data-parallel replicas.

The stacked gradients of all layers are complete only after the backward loop over layers. An all-reduce at that point
cannot overlap with the backward pass. So the loop itself reduces each layer's gradients, and XLA overlaps the
collective with the matrix products of the next layer. Only the backward loop of the last microbatch reduces gradients
(`by_layer`), after the sums of the earlier microbatches are added. So a step sends its gradients only once.

B: sequences in the global batch, M: microbatches, b: sequences in a microbatch, B / M.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import jax
import jax.numpy as jnp

from meshtrain.models.task import Batch, Loss, Params, Sums
from meshtrain.sharding import jaxprs
from meshtrain.sharding.gradients import GradientSync, Reduced
from meshtrain.sharding.placement import Placement
from meshtrain.sharding.trees import merge, select

LossFunction = Callable[[Params, Batch, jax.Array, bool], Loss]  # (params, microbatch, rng, train) -> sums
# (params, batch, rng, seed) -> sums over the batch. The seed, a float32 scalar, multiplies the gradients: it is the
# cotangent of the loss, see `loss_scale.seed`.
Gradients = Callable[[Params, Batch, jax.Array, jax.Array], Sums]
ByIndex: TypeAlias = dict[int, jax.Array]  # index of a trained weight -> an array of its shape
# Entry of a batch -> logical axis of each of its dims; the first is "batch". See `models.task.batch_axes`.
Axes = Mapping[str, Sequence[str | None]]


def split_microbatches(batch: Batch, num_microbatches: int, placement: Placement, axes: Axes) -> Batch:
    """Splits each entry of a batch of B examples into M microbatches of b = B / M: [B, ...] -> [b, M, ...].

    Microbatch m has the examples m, m + M, m + 2 M, ... The reshape keeps each example on its device and needs no
    communication. Microbatches of consecutive examples would send the batch over the network.

    Args:
      batch: entry name -> array [B, ...].
      num_microbatches: M, a divisor of B.
      placement: constrains the sharding of the result, by the activation rules.
      axes: entry name -> the logical axis of each dim.
    """

    def cut_one(name: str, x: jax.Array) -> jax.Array:
        parts = x.reshape(x.shape[0] // num_microbatches, num_microbatches, *x.shape[1:])
        first, *others = axes[name]
        return placement.activation(parts, (first, None, *others))

    return {name: cut_one(name, x) for name, x in batch.items()}


def stack_microbatches(batch: Batch, num_microbatches: int, placement: Placement, axes: Axes) -> Batch:
    """Splits each entry of a batch of B examples into M microbatches of b = B / M: [B, ...] -> [M, b, ...].

    `jax.lax.scan` can loop over the first dim of the result. Microbatch m has the examples m, m + M, m + 2 M, ...

    Args:
      batch: entry name -> array [B, ...].
      num_microbatches: M, a divisor of B.
      placement: constrains the sharding of the result, by the activation rules.
      axes: entry name -> the logical axis of each dim.
    """
    microbatches = split_microbatches(batch, num_microbatches, placement, axes)
    return {name: placement.activation(x.swapaxes(0, 1), (None, *axes[name])) for name, x in microbatches.items()}


def accumulate_gradients(
    loss: LossFunction, num_microbatches: int, placement: Placement, replicas: GradientSync, axes: Axes
) -> Gradients:
    """Returns a function (params, batch, rng, seed) -> `Sums` of a batch, which computes microbatches in sequence.

    `Sums` has the loss, the weight (number of targets), the metrics, and the gradients, which are multiplied by `seed`.
    Gradients are reduced over data-parallel replicas. They are float32 in a pytree with the structure of the
    parameters, with None for each frozen parameter (`replicas.trained`).

    Args:
      loss: the task's loss function.
      num_microbatches: the number of microbatches M.
      placement: constrains the sharding of the microbatches.
      replicas: reduces the gradients over the data axis.
      axes: entry of the batch -> the logical axis of each dim.
    """

    def one(params: Params, batch: Batch, rng: jax.Array, seed: jax.Array) -> Sums:
        trained, frozen = select(params, replicas.trained)

        def total(trained: Params) -> tuple[jax.Array, Loss]:
            value, weight, metrics = loss(merge(trained, frozen), batch, rng, True)
            return value * seed, (value, weight, metrics)

        (_, (value, weight, metrics)), gradients = jax.value_and_grad(total, has_aux=True)(trained)
        return Sums(value, weight, metrics, replicas.part(gradients, replicas.trained_stored))

    def many(params: Params, microbatches: Batch, rng: jax.Array, seed: jax.Array) -> Sums:
        def add(sums: Sums, microbatch: Batch) -> tuple[Sums, None]:
            return jax.tree.map(jnp.add, sums, one(params, microbatch, rng, seed)), None

        first = jax.tree.map(lambda x: x[0], microbatches)
        shapes = jax.eval_shape(one, params, first, rng, seed)
        zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
        trained, _ = select(params, replicas.trained)
        zeros = zeros._replace(gradients=replicas.zeros(trained, replicas.trained_stored))
        return jax.lax.scan(add, _separate_zeros(zeros), microbatches)[0]

    def on_replica(params: Params, batch: Batch, key_data: jax.Array, seed: jax.Array) -> tuple[Loss, Params]:
        rng, microbatches, last = jax.random.wrap_key_data(key_data), None, batch
        if num_microbatches > 1:
            microbatches = stack_microbatches(batch, num_microbatches, placement, axes)
            last = jax.tree.map(lambda x: x[-1], microbatches)
        add_last = by_layer(loss, replicas, params, last, rng, seed) if replicas.reduces_in_loops else None
        if add_last is not None:
            earlier = jax.tree.map(lambda x: x[:-1], microbatches)
            sums = add_last(many(params, earlier, rng, seed) if earlier else None)
        else:
            sums = many(params, microbatches, rng, seed) if microbatches else one(params, last, rng, seed)
        return (sums.loss, sums.weight, sums.metrics), sums.gradients

    def gradients(params: Params, batch: Batch, rng: jax.Array, seed: jax.Array) -> Sums:
        run, key_data = replicas.data_parallel(on_replica), jax.random.key_data(rng)
        (value, weight, metrics), reduced = run(params, batch, key_data, seed)
        return Sums(value, weight, metrics, reduced)

    return gradients


def _separate_zeros(zeros: Sums) -> Sums:
    """Returns the same zeros in a form that XLA does not merge with other zeros of the program.

    The zeros are the initial sums of the loop over microbatches. If `by_layer` computes the last microbatch after this
    loop, it uses other zeros of the same shapes. If XLA merged both, the shared zeros would stay in memory during the
    loop, in addition to the sums.

    Args:
      zeros: zeros with the structure, shapes and dtypes of the sums.
    """
    zero = jax.lax.optimization_barrier(jnp.float32(0))
    return jax.tree.map(lambda leaf: jnp.broadcast_to(zero.astype(leaf.dtype), leaf.shape), zeros)


def by_layer(
    loss: LossFunction, replicas: GradientSync, params: Params, batch: Batch, rng: jax.Array, seed: jax.Array
) -> Callable[[Sums | None], Sums] | None:
    """Returns a function that adds the last microbatch to a step's sums; None if the loss has no loop over layers.

    The function's argument is the `Sums` (loss, weight, metrics and gradients) of all earlier microbatches, or None if
    the step has only one microbatch. The function returns the `Sums` of all microbatches. The backward loop over layers
    reduces the gradients of its layers across data-parallel replicas; they are returned as `Reduced`. All other
    gradients are sums of this replica only.

    Args:
      loss: the task's loss function.
      replicas: reduces the gradients over the data axis.
      params: the parameters, trained and frozen.
      batch: the last microbatch.
      rng: the PRNG key for the loss.
      seed: the factor of the loss in the backward pass, a float32 scalar.
    """
    trained, frozen = select(params, replicas.trained)
    leaves, structure = jax.tree.flatten(trained)

    def loss_of(leaves: list[jax.Array], batch: Batch) -> Loss:
        return loss(merge(jax.tree.unflatten(structure, leaves), frozen), batch, rng, True)

    traced = jaxprs.trace(loss_of, leaves, batch)
    if not traced.sliced:
        return None
    stored = enumerate(jax.tree.leaves(replicas.trained_stored))
    of_layers = {index: weight for index, weight in stored if index in traced.sliced}
    others = {index: leaf for index, leaf in enumerate(leaves) if index not in of_layers}

    def last(before: Sums | None) -> Sums:
        # Without the barrier XLA may start the last microbatch early. Then its activations and the activations of the
        # earlier microbatches are in memory at the same time.
        before, microbatch = jax.lax.optimization_barrier((before, batch))
        local = jax.tree.leaves(before.gradients) if before else [None] * len(leaves)

        def total(others: ByIndex, zeros: ByIndex, microbatch: Batch) -> tuple[jax.Array, Loss]:
            arrays = [others[index] if index in others else leaf for index, leaf in enumerate(leaves)]
            given = {index: (local[index], zero) for index, zero in zeros.items()}
            value, weight, metrics = traced.run(arrays, microbatch, given, replicas.reducing_layers(of_layers))
            return value * seed, (value, weight, metrics)

        zeros = {index: replicas.reduced_zeros(leaves[index], weight) for index, weight in of_layers.items()}
        gradient = jax.value_and_grad(total, argnums=(0, 1), has_aux=True)
        first = before.weight if before else seed
        (_, sums), (parts, reduced) = jaxprs.run_after(gradient, first, others, zeros, microbatch)
        loss_sum, weight_sum, metrics = jax.tree.map(jnp.add, before[:-1], sums) if before else sums
        whole = [
            Reduced(reduced[index]) if index in reduced else _plus(parts[index], before_it)
            for index, before_it in enumerate(local)
        ]
        return Sums(loss_sum, weight_sum, metrics, jax.tree.unflatten(structure, whole))

    return last


def _plus(part: jax.Array, before: jax.Array | None) -> jax.Array:
    """Returns the float32 sum of `before` (gradients of earlier microbatches; None: zero) and the gradient `part`."""
    return part.astype(jnp.float32) if before is None else before + part.astype(jnp.float32)


def accumulate_loss(
    loss: LossFunction, num_microbatches: int, placement: Placement, axes: Axes
) -> Callable[[Params, Batch, jax.Array], Loss]:
    """Returns a function (params, batch, rng) -> sums of loss, weight and metrics over a batch, without gradients.

    The weight is the number of targets. The microbatches of the batch are computed in sequence.

    Args:
      loss: the task's loss function.
      num_microbatches: the number of microbatches M.
      placement: constrains the sharding of the microbatches.
      axes: entry of the batch -> the logical axis of each dim.
    """

    def one(params: Params, batch: Batch, rng: jax.Array) -> Loss:
        return loss(params, batch, rng, False)

    def many(params: Params, batch: Batch, rng: jax.Array) -> Loss:
        microbatches = stack_microbatches(batch, num_microbatches, placement, axes)
        parts = jax.lax.map(lambda microbatch: one(params, microbatch, rng), microbatches)
        return jax.tree.map(lambda part: jnp.sum(part, axis=0), parts)

    return one if num_microbatches == 1 else many
