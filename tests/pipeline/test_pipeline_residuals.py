"""Which results of a loop depend on which of its inputs."""

import jax
import jax.numpy as jnp

from meshtrain.pipeline import residuals


def test_a_loop_passes_on_in_its_next_turn_what_it_read_in_this_one():
    def shifted(a, b):
        turn = lambda carry, x: ((x, carry[0], carry[2]), carry[1])  # noqa: E731
        (_, _, same), stacked = jax.lax.scan(turn, (a, a, a), b)
        return same, stacked

    jaxpr = jax.make_jaxpr(shifted)(jnp.zeros(()), jnp.zeros(4)).jaxpr
    assert residuals.depends(jaxpr, [True, False], on_constants=False) == [True, True]
    assert residuals.depends(jaxpr, [False, True], on_constants=False) == [False, True]
