"""Averages of the weights: an exponential moving average of each trained weight, in the optimizer's state.

After an update the average of a weight w is decay * average + (1 - decay) * w, where w is what the update has left in
float32, whatever dtype stores it (averaging: Polyak and Juditsky 1992; with these weights: Tarvainen and Valpola 2017).
Averages begin at the weights, so no bias has to be corrected. There is no warm-up: after n updates the weights at the
beginning have a share of decay^n.

In the state an average has the path of its weight, so it is sharded, offloaded, counted and saved as moments are, and
stays float32 where moments take fewer bytes. Nothing that trains reads it.
"""

from typing import NamedTuple

import jax
import optax

from meshtrain.sharding.trees import Arrays


class Averaged(NamedTuple):
    """The state of an optimizer with averages beside it.

    Attributes:
      inner: the optimizer's own state.
      averaged_weights: float32, like the parameters that it updates; frozen ones have none.
    """

    inner: Arrays
    averaged_weights: Arrays


def with_averages(inner: optax.GradientTransformation) -> optax.GradientTransformation:
    """Returns an optimizer with room for averages in its state; `followed` moves them, as `update` cannot know all.

    `Task.after_update` may move weights after it.

    Args:
      inner: from float32 parameters and gradients to updates.
    """

    def init(params: Arrays) -> Averaged:
        return Averaged(inner.init(params), params)

    def update(gradients: Arrays, state: Averaged, params: Arrays = None) -> tuple[Arrays, Averaged]:
        updates, after = inner.update(gradients, state.inner, params)
        return updates, Averaged(after, state.averaged_weights)

    return optax.GradientTransformation(init, update)


def followed(state: Averaged, weights: Arrays, decay: float) -> Averaged:
    """Returns the state after an update, with the averages moved towards its weights.

    >>> followed(Averaged((), {"bias": 1.0}), {"bias": 2.0}, 0.75).averaged_weights
    {'bias': 1.25}

    Args:
      state: with the averages before the update.
      weights: after the update, float32, trained ones alone.
      decay: the share that the averages keep, above 0 and below 1.
    """
    # The same as decay * average + (1 - decay) * w, rounded relative to the distance instead of the weight.
    move = lambda average, weight: average + (1 - decay) * (weight - average)  # noqa: E731
    return Averaged(state.inner, jax.tree.map(move, state.averaged_weights, weights))
