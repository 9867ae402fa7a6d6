"""Logical axes of the state go by the names of its fields, not by their order."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from meshtrain.assembly.assemble import assemble
from meshtrain.config.schema import Config, LocalStepsOptions
from meshtrain.lab.compression import CompressionOptions
from meshtrain.models.decoder_options import MoeOptions
from meshtrain.models.transformer.decoder import DecoderOptions
from meshtrain.sharding.reduction import ReductionOptions
from meshtrain.sharding.rules import AXES
from meshtrain.step.shardings import axes_of_leaves
from meshtrain.step.state import TrainState

WEIGHT, MOMENT = ("embed", "mlp"), ("embed", None)


def variant(*order: str) -> Any:
    """An abstract state with these fields in this order, each with arrays of another number of dims."""
    shapes = {"params": [(4, 8)] * 2, "opt_state": [(4, 1), ()], "residual": [(2, 4, 8)], "step": [()]}
    made = dataclasses.make_dataclass("Variant", [(name, Any) for name in order], frozen=True)
    jax.tree_util.register_dataclass(made)
    return made(*([jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes[name]] for name in order))


OF_FIELDS = {"step": [()], "residual": [(None, *WEIGHT)], "opt_state": [MOMENT, ()], "params": [WEIGHT, WEIGHT]}


@pytest.mark.parametrize(
    "order",
    [
        ("step", "params", "opt_state"),
        ("step", "params", "residual", "opt_state"),
        ("opt_state", "residual", "step", "params"),
    ],
)
def test_a_field_has_its_own_axes_wherever_it_stands(order):
    state = variant(*order)
    assert axes_of_leaves(state, OF_FIELDS) == [axes for name in order for axes in OF_FIELDS[name]]


def test_a_field_without_axes_is_named():
    without = {name: axes for name, axes in OF_FIELDS.items() if name != "residual"}
    with pytest.raises(AssertionError, match=r"Variant\.residual has arrays but no logical axes"):
        axes_of_leaves(variant("step", "params", "residual", "opt_state"), without)
    with pytest.raises(AssertionError, match=r"Variant\.params has 2 arrays but 1 logical axes"):
        axes_of_leaves(variant("step", "params"), OF_FIELDS | {"params": [WEIGHT]})


def test_every_array_of_the_training_state_has_as_many_axes_as_dims():
    model = DecoderOptions(num_layers=2, embed_dim=16, mlp_dim=32, num_heads=2, num_kv_heads=2, vocab_size=32)
    compressed = CompressionOptions("int8"), LocalStepsOptions(period=2, groups=2)
    late = ReductionOptions("one_step_late"), LocalStepsOptions()
    routed = dataclasses.replace(model, moe=MoeOptions(num_experts=2, experts_per_token=1, router="sigmoid"))
    held = set()
    for chosen, (reduction, local_steps) in ((model, compressed), (routed, late)):
        config = Config(batch_size=2, sequence_length=8, model=chosen, reduction=reduction, local_steps=local_steps)
        assembly = assemble(config, dict.fromkeys(AXES, 1), jax.devices()[:1])
        leaves = jax.tree_util.tree_leaves_with_path(assembly.state)
        held |= {path[0].name for path, _ in leaves}
        for (path, leaf), axes in zip(leaves, assembly.states.names, strict=True):
            assert len(axes) == leaf.ndim, path
            is_split = path[0].name in ("params", "opt_state", "extra") and leaf.ndim > 0
            is_of_groups = local_steps.period > 0 and getattr(path[-1], "name", "") == "norms"
            is_metric = path[0].name == "extra" and "expert_" in str(path)
            assert any(axes) == ((is_split and not is_metric) or is_of_groups), path
    assert held == {field.name for field in dataclasses.fields(TrainState)}
