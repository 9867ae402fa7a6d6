"""Microbatches: which examples each holds, and that cutting keeps every dim where the rules put it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from meshtrain.layout.axes import AXES
from meshtrain.layout.mesh import make_mesh
from meshtrain.layout.placement import Placement
from meshtrain.layout.rules import LayoutOptions, Rule, default_rules, extend
from meshtrain.step.accumulate import cut, split

BATCH_AXES = {"images": ("batch", "height", "width", "channels"), "labels": ("batch",)}


@pytest.mark.parametrize("function, dims", [(cut, (2, 3)), (split, (3, 2))])
def test_microbatches_of_any_rank_stay_split_as_the_rules_say(function, dims):
    shape = dict.fromkeys(AXES, 1) | {"data": 2, "tensor": 2}
    rules = extend(default_rules(LayoutOptions()), Rule("height", activations=("tensor",)), Rule("width"),
                   Rule("channels"))  # fmt: skip
    mesh = make_mesh(shape, jax.devices()[:4])
    images = jnp.arange(6.0)[:, None, None, None] * jnp.ones((6, 4, 2, 3))
    batch = {"images": jax.device_put(images, NamedSharding(mesh, P("data", "tensor"))), "labels": jnp.arange(6)}
    placement = Placement(rules, mesh)
    found = jax.jit(lambda batch: function(batch, 3, placement, BATCH_AXES))(batch)
    assert found["images"].shape == (*dims, 4, 2, 3)
    wanted = P("data", None, "tensor") if function is cut else P(None, "data", "tensor")
    assert found["images"].sharding.is_equivalent_to(NamedSharding(mesh, wanted), 5)
    numbers = np.arange(6).reshape(2, 3)  # microbatch m holds m, m + 3
    np.testing.assert_array_equal(found["labels"], numbers if function is cut else numbers.T)
    np.testing.assert_array_equal(found["images"][..., 0, 0, 0], found["labels"])
