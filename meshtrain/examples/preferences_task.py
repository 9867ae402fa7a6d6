"""Direct preference optimization (DPO): a decoder learns which of two answers to a prompt is preferred.

b: pairs in a microbatch, T: tokens in the row of a pair, v: columns of the vocabulary on one shard of a manual axis.

A row of a batch contains a pair: segment 1 is the prompt with the chosen answer, segment 2 the prompt with the rejected
answer. Weights are 1 at tokens of answers. The policy is the model that is trained. The reference is the model without
its adapters. If the model has no adapters, the reference is a copy of the initial model, stored under the name `frozen`
in each group of weights (a top-level entry of the parameters, such as `layers`).

Let g be the log-probability of an answer minus its log-probability under the reference, and margin = g(chosen) -
g(rejected). The loss of a pair is -log sigmoid(beta margin) (Rafailov et al. 2023, equation 7), or (margin - 1 / (2
beta))^2 with each g divided by the tokens of its answer (IPO, Azar et al. 2023, equation 17, as implemented in TRL).
Rewards are beta g.
"""

import dataclasses
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp

from meshtrain.config import tasks
from meshtrain.config.schema import Config
from meshtrain.config.tasks import BuiltIn, source_problems
from meshtrain.errors import Problem
from meshtrain.hf import adapters
from meshtrain.models.decoder_options import DecoderOptions
from meshtrain.models.lora import LoraOptions
from meshtrain.models.task import Activations, Batch, LayerSums, Loss, Params, Stages, Task, loss_of_stages
from meshtrain.models.vocabulary import Axis, token_losses
from meshtrain.options import option
from meshtrain.sharding.placement import Placement
from meshtrain.sharding.trainable import FROZEN, is_adapter
from meshtrain.sharding.trees import Arrays

CHOSEN, REJECTED = 1, 2  # segments of a row


@dataclasses.dataclass(frozen=True)
class PreferenceOptions(DecoderOptions):
    """The options of the task `preferences`: the decoder's options and the options of the loss."""

    beta: float = option(
        0.1, "how strictly the model stays near its reference; a smaller beta allows larger changes", minimum=1e-6
    )
    preference_loss: str = option("sigmoid", "sigmoid (DPO) or ipo", choices=("sigmoid", "ipo"))


def policy_of(group: Params) -> Params:
    """Returns the weights of the trained model (policy) in a group: all weights except the frozen copy.

    A group is a top-level entry of the parameters, such as `layers`. With adapters, the result has the adapters and the
    weights to which they are added.
    """
    return {name: part for name, part in group.items() if name != FROZEN}


def reference_of(group: Params) -> Params:
    """Returns the weights of the reference model in a group: the frozen copy, or else the weights without adapters.

    A group is a top-level entry of the parameters, such as `layers`.
    """
    if FROZEN in group:
        return group[FROZEN]
    inner = {name: reference_of(part) if isinstance(part, Mapping) else part for name, part in group.items()}
    return {name: part for name, part in inner.items() if not is_adapter(name)}


def _each(of_group: Callable[[Params], Params], params: Params) -> Params:
    return {name: of_group(group) for name, group in params.items()}


def with_copy(params: Params) -> Params:
    """Returns the parameters with a frozen copy of each group's weights, in the group's entry `frozen`.

    A group is a top-level entry of the parameters, such as `layers`. An existing copy is replaced.
    """
    return _each(lambda group: {**policy_of(group), FROZEN: jax.tree.map(jnp.copy, policy_of(group))}, params)


@dataclasses.dataclass(frozen=True)
class Preferences:
    """The pipeline functions of DPO, which run the trained model (policy) and the frozen reference model together.

    Activations are pairs (activations of the policy, activations of the reference). The reference has no gradient.

    Attributes:
      stages: functions of the decoder.
      columns: `Stages.logits` of the decoder: (params, activations, axis) -> logits.
      options: options of the decoder and of the loss.
    """

    stages: Stages
    columns: Callable[..., jax.Array]  # `Stages.logits`
    options: PreferenceOptions

    def first(self, params: Params, batch: Batch, rng: jax.Array, train: bool, axis: Axis = None) -> Activations:
        """Returns the activations of policy and reference that enter the first layer, each [b, T, D]; see `Stages`."""
        policy, reference = (_each(of, params) for of in (policy_of, reference_of))
        x = self.stages.first(policy, batch, rng, train, axis)
        return x, jax.lax.stop_gradient(self.stages.first(reference, batch, rng, False, axis))

    def repeated(
        self, layers: Params, both: Activations, batch: Batch, rng: jax.Array, start: jax.Array | int, train: bool
    ) -> tuple[Activations, LayerSums]:
        """Returns both models' activations after K layers, and the policy's auxiliary losses and metrics.

        In the losses and metrics, each pair has the weight 1, whatever its number of targets. `both` are the
        activations of policy and reference that enter the first of the K layers; `Stages.repeated` describes the other
        arguments.
        """
        num_targets = jnp.sum(batch["weights"], axis=1, keepdims=True)
        of_pairs = {**batch, "weights": batch["weights"] / jnp.maximum(num_targets, 1.0)}
        x, sums = self.stages.repeated(policy_of(layers), both[0], of_pairs, rng, start, train)
        fixed = jax.lax.stop_gradient((reference_of(layers), both[1]))
        y, _ = self.stages.repeated(fixed[0], fixed[1], batch, rng, start, False)
        return (x, y), sums

    def last(self, params: Params, both: Activations, batch: Batch, axis: Axis = None) -> Loss:
        """Returns (sum of the losses of pairs, number of pairs, sums of metrics), float32 scalars.

        The metrics are `accuracy`, `reward_margin`, `chosen_reward` and `rejected_reward`. `both` are the activations
        of policy and reference after the last layer. A row without a weight above 0 is padding.
        """
        o = self.options
        weights = jnp.stack([batch["weights"] * (batch["segment_ids"] == one) for one in (CHOSEN, REJECTED)])
        models = [(_each(of, params), x) for of, x in zip((policy_of, reference_of), both, strict=True)]
        of_tokens = [-token_losses(self.columns(*one, axis), batch["targets"], o.vocab_size, axis) for one in models]
        gains = jnp.sum((of_tokens[0] - jax.lax.stop_gradient(of_tokens[1])) * weights, axis=-1)  # [2, b]
        margin = gains[0] - gains[1]
        if o.preference_loss == "ipo":
            means = gains / jnp.maximum(jnp.sum(weights, axis=-1), 1.0)
            losses = jnp.square(means[0] - means[1] - 1 / (2 * o.beta))
        else:
            losses = jax.nn.softplus(-o.beta * margin)
        is_pair = jnp.any(batch["weights"] > 0, axis=1).astype(jnp.float32)
        metrics = {
            "accuracy": margin > 0,
            "reward_margin": o.beta * margin,
            "chosen_reward": o.beta * gains[0],
            "rejected_reward": o.beta * gains[1],
        }
        sums = {name: jax.lax.stop_gradient(jnp.sum(value * is_pair)) for name, value in metrics.items()}
        return jnp.sum(losses * is_pair), jnp.sum(is_pair), sums

    def logits(self, params: Params, both: Activations, axis: Axis = None) -> jax.Array:
        """Returns the logits of the policy, given the activations of policy and reference; see `Stages.logits`."""
        return self.columns(_each(policy_of, params), both[0], axis)


def _of_policy(function: Callable[..., Arrays]) -> Callable[..., Arrays]:
    return lambda params, *given: function(_each(policy_of, params), *given)


def _make(config: Config, placement: Placement) -> Task:
    task = tasks.decoder(config, placement)
    without = tasks.decoder(dataclasses.replace(config, lora=LoraOptions()), placement)
    assert task.stages is not None
    assert task.stages.logits is not None
    assert task.logits is not None
    assert task.decode is not None
    pairs, copies = Preferences(task.stages, task.stages.logits, config.model), not config.lora.rank
    stages = dataclasses.replace(
        task.stages, first=pairs.first, repeated=pairs.repeated, last=pairs.last, logits=pairs.logits,
        loss_name="preference_loss" if config.model.moe.num_experts else "",
    )  # fmt: skip
    prefill, step, length = _of_policy(task.decode.prefill), _of_policy(task.decode.step), config.sequence_length
    return dataclasses.replace(
        task,
        loss=loss_of_stages(stages),
        stages=stages,
        unit="pairs",
        init=(lambda rng: with_copy(task.init(rng))) if copies else task.init,
        begin=with_copy if copies else None,
        logits=_of_policy(task.logits),
        decode=dataclasses.replace(task.decode, prefill=prefill, step=step),
        flops_per_token=length * (task.flops_per_token + without.flops_per_token / 3),
        attention_flops_per_token=length * task.attention_flops_per_token * 4 / 3,
        num_parameters=task.num_parameters * (1 + copies),
        cost=lambda mesh_shape, num_pairs: task.cost(mesh_shape, num_pairs * length),
    )


def _check(config: Config, mesh_shape: Mapping[str, int]) -> list[Problem]:
    """Returns an error line for each conflict of the task's options with each other, with the data or with the mesh.

    Args:
      config: configuration with `PreferenceOptions` as its model.
      mesh_shape: mesh axis -> size.
    """
    found = source_problems(config, ("preferences",), "pairs of answers") + tasks.model_problems(config, mesh_shape)
    if not config.model.within_documents:
        found.append(
            Problem(
                "model.within_documents",
                got=False,
                condition="with task=preferences, whose rows contain two texts",
                allowed=True,
                nearest="model.within_documents=true",
            )
        )
    if config.lora.rank and config.optimizer.trainable:
        found.append(
            Problem(
                "optimizer.trainable",
                got=f"'{config.optimizer.trainable}'",
                condition="with task=preferences and adapters, whose base model is the reference",
                allowed="''",
                nearest="leave it out",
                depends_on=["lora.rank"],
            )
        )
    if config.init_from and not config.lora.rank and adapters.is_folder(config.init_from):
        fix = "the lora.rank of the folder, or `hf export` of a run with lora.rank=0 that merges them"
        found.append(
            Problem(
                "init_from",
                got="adapters to be merged",
                condition="with task=preferences",
                allowed="weights",
                nearest=fix,
            )
        )
    return found


built_in = BuiltIn("preferences", _make, PreferenceOptions, _check, takes_adapters=True)
