"""Training in groups: each trains on its share of the batch, and every few steps an outer optimizer joins them.

DiLoCo (Douillard et al. 2023, "DiLoCo: Distributed Low-Communication Training of Language Models") is Nesterov SGD on
the mean distance that the groups have gone. With an outer learning rate of 1 and no momentum the groups' weights are
averaged: local SGD (Stich 2019), or federated averaging (McMahan et al. 2017).
"""

import dataclasses

import jax.numpy as jnp
import optax

from meshtrain.words.options import AllBut, option

_IN_GROUPS = {"period": AllBut(0)}


@dataclasses.dataclass(frozen=True)
class LocalStepsOptions:
    """How often groups that train apart exchange weights."""

    period: int = option(0, "steps of each group between two exchanges of weights; 0: no groups, every step", minimum=0)
    groups: int = option(
        0, "groups that train apart, each on its share of the batch, with a period; mesh.data divides them", minimum=0,
        only_for=_IN_GROUPS,
    )  # fmt: skip
    outer_learning_rate: float = option(
        0.7, "outer SGD's factor of the mean distance that the groups have gone; 1: their mean", minimum=0.0,
        only_for=_IN_GROUPS,
    )  # fmt: skip
    outer_momentum: float = option(
        0.9, "decay of the outer SGD's Nesterov momentum; 0: none", minimum=0.0, only_for=_IN_GROUPS
    )
    delay: int = option(
        0, "steps after which a gradient is applied, without a period; 1 hides its reduction", minimum=0, maximum=1
    )


@dataclasses.dataclass(frozen=True)
class Outer:
    """How groups are joined.

    Attributes:
      num_groups: G, the number of groups.
      transformation: the optimizer of the anchor, from which all groups start again. It gets the anchor less the mean
        of the groups' weights in place of a gradient.
    """

    num_groups: int
    transformation: optax.GradientTransformation


def check(options: LocalStepsOptions) -> list[str]:
    """Returns one line for each value that is too large, or missing with another."""
    lines = []
    if options.outer_momentum >= 1:
        lines.append(
            f"local_steps.outer_momentum: got {options.outer_momentum}; allowed: at least 0 and below 1; nearest: 0.9"
        )
    return lines


def outer_optimizer(options: LocalStepsOptions) -> Outer | None:
    """Returns how groups are joined; None without groups."""
    if options.period == 0:
        return None
    momentum = options.outer_momentum or None
    sgd = optax.sgd(options.outer_learning_rate, momentum, nesterov=momentum is not None, accumulator_dtype=jnp.float32)
    return Outer(options.groups, sgd)
