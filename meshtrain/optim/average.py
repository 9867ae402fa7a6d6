"""Averages of the weights: an exponential moving average of each trained weight, in the optimizer's state.

After an update the average of a weight w is decay * average + (1 - decay) * w. Here w is the updated weight in float32,
even if it is stored in another dtype (averaging: Polyak and Juditsky 1992; exponential weights: Tarvainen and Valpola
2017). Averages start at the initial weights, so there is no bias to correct. There is no warm-up: after n updates the
initial weights still contribute to the average with the factor decay^n.

In the optimizer's state an average has the path of its weight, so averages are sharded, offloaded, counted and saved
like moments. They are float32 even if moments are stored in fewer bytes. Training never reads them.
"""

from typing import NamedTuple

import jax
import optax

from meshtrain.sharding.trees import Arrays


class Averaged(NamedTuple):
    """The state of an optimizer, with averages of the weights.

    Attributes:
      inner: the state of the optimizer without averages.
      averaged_weights: a pytree with the float32 average of each trained parameter.
    """

    inner: Arrays
    averaged_weights: Arrays


def with_averages(inner: optax.GradientTransformation) -> optax.GradientTransformation:
    """Returns an optimizer whose state also contains weight averages, which only `update_average` changes.

    The optimizer's `update` does not change them, because `Task.after_update` may change the weights after `update`.

    Args:
      inner: the optimizer without averages, which computes updates from float32 gradients and parameters.
    """

    def init(params: Arrays) -> Averaged:
        return Averaged(inner.init(params), params)

    def update(gradients: Arrays, state: Averaged, params: Arrays = None) -> tuple[Arrays, Averaged]:
        updates, after = inner.update(gradients, state.inner, params)
        return updates, Averaged(after, state.averaged_weights)

    return optax.GradientTransformation(init, update)


def update_average(state: Averaged, weights: Arrays, decay: float) -> Averaged:
    """Returns the optimizer's state with its averages moved towards the updated weights.

    >>> update_average(Averaged((), {"bias": 1.0}), {"bias": 2.0}, 0.75).averaged_weights
    {'bias': 1.25}

    Args:
      state: the state with the averages before the update.
      weights: the trained weights after the update, float32.
      decay: the weight of the old average, above 0 and below 1.
    """
    # Equals decay * average + (1 - decay) * w, but rounded relative to the distance instead of the weight.
    move = lambda average, weight: average + (1 - decay) * (weight - average)  # noqa: E731
    return Averaged(state.inner, jax.tree.map(move, state.averaged_weights, weights))
