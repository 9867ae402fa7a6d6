"""The box of a weight with logical axes, and the boxes of Flax, which are read without an import of Flax."""

import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx
from jax.sharding import PartitionSpec

from meshtrain.errors import UserError
from meshtrain.sharding.named import Named, unbox
from meshtrain.sharding.param_sharding import params_with_axes

AXES = ("embed", None)


def by_flax(shape):
    with nnx.use_eager_sharding(False):
        make = nnx.with_partitioning(nnx.initializers.ones, AXES)
        return nnx.Linear(*shape, use_bias=False, kernel_init=make, rngs=nnx.Rngs(0)).kernel


BOXES = {
    "ours": lambda w: Named(w, AXES),
    "a list": lambda w: Named(w, list(AXES)),
    "a spec": lambda w: Named(w, PartitionSpec(*AXES)),
    "Linen, logical axes": lambda w: nn.LogicallyPartitioned(w, AXES),
    "Linen": lambda w: nn.Partitioned(w, AXES),
    "NNX, metadata": lambda w: nnx.Param(w, axes=AXES),
    "NNX, partitioning": lambda w: by_flax(w.shape),
}


def test_boxes_state_the_same_names_and_contain_the_same_array():
    """One tree of all boxes: the paths of the weights do not contain the boxes."""
    init = lambda rng: {"layer": {name: box(jnp.ones((4, 2))) for name, box in BOXES.items()}, "bare": jnp.ones(3)}  # noqa: E731
    params, axes = params_with_axes(init, on_one_device=True)
    assert axes == {"layer": dict.fromkeys(BOXES, AXES), "bare": (None,)}
    assert params == {
        "layer": dict.fromkeys(BOXES, jax.ShapeDtypeStruct((4, 2), np.float32)),
        "bare": jax.ShapeDtypeStruct((3,), np.float32),
    }
    arrays = unbox(init(None))
    assert all(type(array) is type(jnp.ones(())) for array in jax.tree.leaves(arrays))
    jax.tree.map(np.testing.assert_array_equal, arrays, jax.tree.map(lambda like: np.ones(like.shape), params))


@pytest.mark.parametrize(
    ("box", "got"),
    [
        (lambda w: Named(w, None), "None"),
        (lambda w: Named(w, "embed"), "'embed'"),
        (lambda w: Named(w, ("embed", 3)), "('embed', 3)"),
        (lambda w: Named(w, PartitionSpec(("embed", "mlp"), None)), "(('embed', 'mlp'), None)"),
        (lambda w: nn.LogicallyPartitioned(w, None), "None"),
        (lambda w: nnx.Param(w), "None"),
        (lambda w: nnx.Param(w, axes="embed"), "'embed'"),
    ],
)
def test_a_box_without_names_is_an_error_with_the_path_of_the_weight(box, got):
    line = f"layer/up: shape (4, 2): got {got} as logical axes; allowed: a name or None for each dim; nearest: "
    with pytest.raises(UserError, match=re.escape(line)):
        params_with_axes(lambda rng: {"layer": {"up": box(jnp.ones((4, 2)))}})


def test_named_passes_through_transformations_with_its_names():
    boxed = jax.jit(jax.vmap(lambda w: Named(2 * w, AXES)))(jnp.ones((3, 4, 2)))
    assert (boxed.names, boxed.value.shape) == (AXES, (3, 4, 2))
    shape = jax.eval_shape(lambda: {"up": Named(jnp.ones((4, 2)), AXES)})["up"]
    assert shape == Named(jax.ShapeDtypeStruct((4, 2), np.float32), AXES)


def test_boxes_are_read_without_flax_and_training_imports_no_nnx():
    code = """
import sys
import meshtrain.sharding.param_sharding
from meshtrain import Named
assert not [name for name in sys.modules if name.partition(".")[0] == "flax"]
import meshtrain.training
assert "flax.nnx" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
