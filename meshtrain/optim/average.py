"""Averages of the weights: an exponential moving average of each trained weight, in the optimizer's state.

After an update the average of a weight w is decay * average + (1 - decay) * w. Here w is the updated weight in float32,
even if it is stored in another dtype (averaging: Polyak and Juditsky 1992; exponential weights: Tarvainen and Valpola
2017). Averages start at the initial weights, so there is no bias to correct. There is no warm-up: after n updates the
initial weights have a share of decay^n.

In the state an average has the path of its weight, so it is sharded, offloaded, counted and saved like moments. It
stays float32 even if moments are stored in fewer bytes. Training never reads it.
"""

from typing import NamedTuple

import jax
import optax

from meshtrain.sharding.trees import Arrays


class Averaged(NamedTuple):
    """The state of an optimizer, with averages of the weights.

    Attributes:
      inner: the optimizer's own state.
      averaged_weights: float32, for each parameter that it updates; frozen parameters have none.
    """

    inner: Arrays
    averaged_weights: Arrays


def with_averages(inner: optax.GradientTransformation) -> optax.GradientTransformation:
    """Returns an optimizer whose state has averages; its `update` does not change them, `update_average` does.

    The averages follow the weights after `Task.after_update`, which runs after `update` and may change weights.

    Args:
      inner: from float32 parameters and gradients to updates.
    """

    def init(params: Arrays) -> Averaged:
        return Averaged(inner.init(params), params)

    def update(gradients: Arrays, state: Averaged, params: Arrays = None) -> tuple[Arrays, Averaged]:
        updates, after = inner.update(gradients, state.inner, params)
        return updates, Averaged(after, state.averaged_weights)

    return optax.GradientTransformation(init, update)


def update_average(state: Averaged, weights: Arrays, decay: float) -> Averaged:
    """Returns the state with its averages moved towards the updated weights.

    >>> update_average(Averaged((), {"bias": 1.0}), {"bias": 2.0}, 0.75).averaged_weights
    {'bias': 1.25}

    Args:
      state: with the averages before the update.
      weights: after the update, float32, only trained weights.
      decay: the weight of the old average, above 0 and below 1.
    """
    # Equals decay * average + (1 - decay) * w, but rounded relative to the distance instead of the weight.
    move = lambda average, weight: average + (1 - decay) * (weight - average)  # noqa: E731
    return Averaged(state.inner, jax.tree.map(move, state.averaged_weights, weights))
