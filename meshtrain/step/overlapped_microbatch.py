"""The last microbatch of a step, in which gradients of layers are reduced over data one layer after the other.

Stacked gradients exist only when the backward loop over the layers is over, and an all-reduce of them has no product
left to run beside. So the loop reduces each layer's gradients, and XLA moves the collective beside the products of the
next layer. It does so in the last microbatch only, with the sums of the earlier ones added: the bytes are those of one
reduction a step.
"""

from collections.abc import Callable
from typing import TypeAlias

import jax
import jax.numpy as jnp

from meshtrain.models.task import Batch, Loss, Params, Sums
from meshtrain.sharding import jaxprs
from meshtrain.sharding.gradients import Reduced, Replicas
from meshtrain.sharding.trees import merged, select

ByIndex: TypeAlias = dict[int, jax.Array]  # index of a trained weight -> an array like it


def by_layer(
    loss: Callable[[Params, Batch, jax.Array, bool], Loss],
    replicas: Replicas,
    params: Params,
    batch: Batch,
    rng: jax.Array,
    seed: jax.Array,
) -> Callable[[Sums | None], Sums] | None:
    """Returns the last microbatch of a step: sums of the earlier ones -> sums of all.

    Gradients of layers that one loop computes one after the other are reduced over data inside the backward loop, and
    are `Reduced`. The others are local sums.

    Args:
      loss: (params, microbatch, rng, train) -> sums.
      replicas: reduces the gradients.
      params: all of them, trained or not.
      batch: the last microbatch.
      rng: a typed key.
      seed: float32 scalar, the cotangent of the loss.

    Returns:
      None where the loss has no such loop. The function's argument is None where there is one microbatch only.
    """
    trained, frozen = select(params, replicas.trained)
    leaves, structure = jax.tree.flatten(trained)

    def loss_of(leaves: list[jax.Array], batch: Batch) -> Loss:
        return loss(merged(jax.tree.unflatten(structure, leaves), frozen), batch, rng, True)

    traced = jaxprs.traced(loss_of, leaves, batch)
    if not traced.sliced:
        return None
    stored = enumerate(jax.tree.leaves(replicas.trained_stored))
    of_layers = {index: weight for index, weight in stored if index in traced.sliced}
    others = {index: leaf for index, leaf in enumerate(leaves) if index not in of_layers}

    def last(before: Sums | None) -> Sums:
        # Otherwise XLA begins it early, and its activations are in memory beside those of the others.
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
            Reduced(reduced[index]) if index in reduced else _plus(parts[index], sum_before)
            for index, sum_before in enumerate(local)
        ]
        return Sums(loss_sum, weight_sum, metrics, jax.tree.unflatten(structure, whole))

    return last


def _plus(part: jax.Array, before: jax.Array | None) -> jax.Array:
    """Returns a gradient in float32, added to the sum of the earlier microbatches if there is one."""
    return part.astype(jnp.float32) if before is None else before + part.astype(jnp.float32)
