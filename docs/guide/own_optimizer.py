"""A custom optimizer: the sign of a momentum that includes this step's gradient; its state is one number per weight.

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
    """Options in the group `optimizer`; two of them also exist for other optimizers, with the same defaults."""

    momentum: float = option(0.95, "decay of the momentum", minimum=0.0, maximum=0.999)
    weight_decay: float = option(0.1, "decoupled weight decay of matrices and tables", minimum=0.0)
    nesterov: bool = option(True, "whether the sign is taken after the gradient was added once more")


def sign_momentum(options: SignMomentumOptions, rates: optax.Schedule, axes: Any) -> optax.GradientTransformation:
    """Returns the optimizer for weights with these logical axes; `rates`: number of updates -> learning rate."""
    return optax.chain(
        optax.trace(options.momentum, nesterov=options.nesterov, accumulator_dtype=jnp.float32),
        optax.scale_by_sign(),
        optax.add_decayed_weights(options.weight_decay, decays(axes)),
        optax.scale_by_learning_rate(rates),
    )


sign_momentum.options = SignMomentumOptions
sign_momentum.elementwise = True  # each number of a weight moves by its own gradient and momentum
