"""Makes the functions that compute gradients, evaluation sums and logits of a batch, with and without a pipeline."""

import dataclasses
from collections.abc import Callable

import jax

from meshtrain.assembly.placed import Placed
from meshtrain.config.mesh_checks import num_microbatches
from meshtrain.config.schema import Config
from meshtrain.errors import Problem, UserError
from meshtrain.models.task import Batch, Loss, Params, Sums, batch_axes
from meshtrain.pipeline import executor, inference
from meshtrain.sharding.rules import PIPELINE
from meshtrain.step.accumulate import Gradients, accumulate_gradients, accumulate_loss, split_microbatches
from meshtrain.step.step import with_sequence_index


@dataclasses.dataclass(frozen=True)
class Computations:
    """The functions of weights and a batch.

    Attributes:
      gradients: a function (params, batch, rng, seed) -> sums of loss, weight, metrics and gradients over the batch;
        the gradients are multiplied by the seed.
      evaluate: a function (params, batch, rng) -> sums of loss, weight and metrics over the batch.
      logits: a function (params, batch) -> float32 [sequences, tokens, vocabulary]; None if the task has no logits.
    """

    gradients: Gradients
    evaluate: Callable[[Params, Batch, jax.Array], Loss]
    logits: Callable[[Params, Batch], jax.Array] | None


def computations(config: Config, placed: Placed) -> Computations:
    """Returns the functions that compute gradients, evaluation sums and logits of a batch on a mesh.

    `gradients` and `evaluate` split the batch into microbatches.

    Raises:
      UserError: the mesh has a pipeline axis, but the task has no stages.
    """
    return _whole(config, placed) if placed.program is None else _staged(config, placed)


def _whole(config: Config, placed: Placed) -> Computations:
    """Returns the functions of a batch on a mesh without a pipeline: a device computes all layers on its shard."""
    task, axes, parts = placed.task, batch_axes(placed.batch), num_microbatches(config, placed.mesh.shape)
    of_task = task.logits
    # The decoder's `task.loss` is last(repeated(first(batch))) of `models/transformer/task.py`.
    return Computations(
        gradients=accumulate_gradients(task.loss, parts, placed.placement, placed.replicas, axes),
        evaluate=accumulate_loss(task.loss, parts, placed.placement, axes),
        logits=of_task and (lambda params, batch: of_task(params, with_sequence_index(batch))),
    )


def _staged(config: Config, placed: Placed) -> Computations:
    """Returns the functions of a batch on a mesh with a pipeline: a stage computes some layers for all microbatches."""
    task, program, mesh = placed.task, placed.program, placed.mesh
    parts, axes, stages, specs = (
        num_microbatches(config, mesh.shape),
        batch_axes(placed.batch),
        task.stages,
        placed.replicas.specs,
    )
    assert program is not None
    if stages is None:
        size = mesh.shape[PIPELINE]
        raise UserError(
            Problem(
                "mesh.pipeline",
                got=f"{size}, but this task has no pipeline stages",
                allowed=1,
                nearest="mesh.pipeline=1",
            )
        )
    num_chunks = program.schedule.num_chunks

    def gradients(params: Params, batch: Batch, rng: jax.Array, seed: jax.Array) -> Sums:
        microbatches = split_microbatches(batch, parts, placed.placement, axes)
        return executor.gradients(stages, program, placed.replicas, params, microbatches, rng, seed)

    def evaluate(params: Params, batch: Batch, rng: jax.Array) -> Loss:
        microbatches = split_microbatches(batch, parts, placed.placement, axes)
        return inference.evaluate(stages, num_chunks, mesh, specs, params, microbatches, rng)

    def logits(params: Params, batch: Batch) -> jax.Array:
        one = split_microbatches(with_sequence_index(batch), 1, placed.placement, axes)
        return inference.logits(stages, num_chunks, mesh, specs, params, one)[0]

    return Computations(gradients, evaluate, logits if stages.logits else None)
