"""A custom optimizer: updates are the sign of a momentum, which is its only state: one number per parameter.

python -m meshtrain train --config=configs/tiny.py --config.optimizer.name=docs.guide.own_optimizer:sign_momentum
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
import optax

from meshtrain.options import option
from meshtrain.sharding.param_kinds import decays


@dataclasses.dataclass(frozen=True)
class SignMomentumOptions:
    """Options in the group `optimizer`; other optimizers have `momentum` and `weight_decay` with the same defaults."""

    momentum: float = option(0.95, "decay of the momentum", minimum=0.0, maximum=0.999)
    weight_decay: float = option(0.1, "decoupled weight decay of matrices and tables", minimum=0.0)
    nesterov: bool = option(True, "Nesterov momentum: add the gradient once more before the sign is taken")


def sign_momentum(options: SignMomentumOptions, rates: optax.Schedule, axes: Any) -> optax.GradientTransformation:
    """Returns the optimizer for weights with these logical axes; `rates`: number of updates -> learning rate."""
    return optax.chain(
        optax.trace(options.momentum, nesterov=options.nesterov, accumulator_dtype=jnp.float32),
        optax.scale_by_sign(),
        optax.add_decayed_weights(options.weight_decay, decays(axes)),
        optax.scale_by_learning_rate(rates),
    )


sign_momentum.options = SignMomentumOptions
sign_momentum.elementwise = True  # the update of each element depends only on the gradient and momentum of this element
