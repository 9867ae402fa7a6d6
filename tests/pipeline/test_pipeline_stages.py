"""What the executor does with weights, read off the traced step: cast once a step, never kept by a loop."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import Literal

from meshtrain.assembly.assemble import assemble
from meshtrain.config.build import default
from meshtrain.config.resolve import resolve
from meshtrain.models.transformer.task import decoder
from meshtrain.pipeline import check as pipeline_check
from meshtrain.pipeline import executor, pullback
from meshtrain.pipeline import stages as ring
from meshtrain.pipeline.schedules import layers_of_chunks
from meshtrain.sharding.rules import AXES

NUM_STAGES, TENSOR = 2, 2
SHAPE = dict.fromkeys(AXES, 1) | {"pipeline": NUM_STAGES, "tensor": TENSOR}


@pytest.mark.parametrize(
    ("num_layers", "num_stages", "num_chunks", "expected"),
    [
        (6, 4, 1, [2, 2, 1, 1]),
        (5, 4, 1, [2, 1, 1, 1]),
        (7, 4, 1, [2, 2, 2, 1]),
        (10, 4, 1, [3, 3, 3, 1]),
        (9, 4, 1, [3, 2, 2, 2]),
        (7, 2, 3, [2, 1, 1, 1, 1, 1]),
        (5, 2, 2, [2, 2, 1, 0]),
    ],
)
def test_layers_return_in_order_from_their_places(num_layers, num_stages, num_chunks, expected):
    assert list(map(len, layers_of_chunks(num_layers, num_stages, num_chunks))) == expected
    assert not pipeline_check._without_layers("L", num_layers, num_stages, num_chunks)
    stack = ring.Stack(num_layers, num_stages, num_chunks)
    layers = jnp.arange(1, num_layers + 1)
    stored = stack.of_layers(layers)
    assert stored.shape == stack.shape
    in_chunks = np.reshape(stored, (len(expected), -1))
    assert np.count_nonzero(in_chunks, axis=1).tolist() == expected
    np.testing.assert_array_equal(in_chunks[in_chunks > 0], layers)
    np.testing.assert_array_equal(ring.reshape_stack(stored, (num_layers,), stack), layers)


def test_a_stack_outside_of_the_pipeline_keeps_its_shape_in_checkpoints():
    """A custom task may name a dim of other weights `layers` as well."""
    stack, chunks = ring.Stack(6, 4, 1), ring.Stack(7, 2, 3)
    assert ring.layer_order_shape((*stack.shape, 5), (*stack.names, None), stack) == (6, 5)
    assert ring.layer_order_shape((9, 5), ("layers", None), stack) == (9, 5)
    assert ring.layer_order_shape((5, 9), (None, "layers"), stack) == (5, 9)
    assert ring.layer_order_shape((*chunks.shape, 5), (*chunks.names, None), chunks) == (7, 5)
    assert ring.layer_order_shape((9, 5), ("layers", None), chunks) == (9, 5)


def test_a_stage_without_layers_is_refused():
    [line] = pipeline_check._without_layers("model.num_layers", 3, 4, 1)
    assert line.endswith("has no layer; allowed: at least 4; nearest: 4")
    [line] = pipeline_check._without_layers("model.num_layers", 2, 2, 2)
    assert line.endswith("has no layer; allowed: at least 3; nearest: 3")


def config(num_chunks, trainable=""):
    given = default()
    given.mesh.pipeline, given.mesh.tensor = NUM_STAGES, TENSOR
    given.precision.policy = "bfloat16"
    given.model.num_layers = 2 * NUM_STAGES * num_chunks
    given.model.embed_dim, given.model.mlp_dim, given.model.num_heads, given.model.num_kv_heads = 48, 80, 4, 4
    given.batch_size, given.sequence_length, given.pipeline.num_microbatches = 4, 16, 4
    given.optimizer.trainable = trainable
    if num_chunks > 1:
        given.pipeline.schedule, given.pipeline.num_chunks = "interleaved_1f1b", num_chunks
    return resolve(given, reads_data=False)


def inner(equation):
    """Yields the jaxprs in an equation's parameters."""
    for value in equation.params.values():
        for one in value if isinstance(value, tuple | list) else [value]:
            if jaxpr := getattr(one, "jaxpr", one if hasattr(one, "eqns") else None):
                yield jaxpr


def equations(jaxpr, in_loop=False):
    """Yields (equation, whether it stands in a loop), inner ones too."""
    for equation in jaxpr.eqns:
        yield equation, in_loop
        for body in inner(equation):
            yield from equations(body, in_loop or equation.primitive.name in ("scan", "while"))


@functools.cache
def traced(num_chunks, trainable=""):
    """Returns the equations of the step, and the sizes of the matrices of a layer."""
    assembly = assemble(config(num_chunks, trainable), SHAPE, jax.devices()[: NUM_STAGES * TENSOR])
    step = assembly.steps.train.trace(assembly.state, assembly.batch).jaxpr
    leaves, layers = jax.tree.leaves(assembly.state.params["layers"]), assembly.config.model.num_layers
    sizes = {leaf.size // layers for leaf in leaves if leaf.size // layers > assembly.config.model.embed_dim}
    assert len(sizes) == 2, "of attention and of the mlp"
    return list(equations(step.jaxpr)), sizes


@pytest.mark.parametrize("num_chunks, trainable", [(1, ""), (2, ""), (1, "attention")])
def test_no_weight_waits_for_a_backward_row(num_chunks, trainable, monkeypatch):
    units = []

    def recorded(*given):
        units.append(pullback.SplitLayer(*given))
        return units[-1]

    monkeypatch.setattr(executor, "SplitLayer", recorded)
    _, sizes = traced.__wrapped__(num_chunks, trainable)
    (unit,) = units
    assert unit.kept
    assert not sizes & {leaf.size for leaf in unit.kept}


@pytest.mark.parametrize("num_chunks", [1, 2])
def test_weights_are_cast_outside_of_loops(num_chunks):
    found, sizes = traced(num_chunks)
    narrowed = [
        (equation.invars[0].aval, in_loop)
        for equation, in_loop in found
        if equation.primitive.name == "convert_element_type" and equation.params["new_dtype"] == jnp.bfloat16
    ]
    assert any(not in_loop and aval.ndim > 2 for aval, in_loop in narrowed), "nothing is cast before the rows"
    assert not [aval for aval, in_loop in narrowed if in_loop and aval.dtype == jnp.float32 and aval.size in sizes]


def test_a_cast_in_the_rows_is_noticed(monkeypatch):
    monkeypatch.setattr(ring, "with_cast_layers", lambda _, params: params)
    found, sizes = traced.__wrapped__(1)
    assert any(
        in_loop and equation.invars[0].aval.dtype == jnp.float32 and equation.invars[0].aval.size in sizes
        for equation, in_loop in found
        if equation.primitive.name == "convert_element_type"
    )


@pytest.mark.parametrize("num_chunks", [1, 2])
def test_loops_over_one_chunk_read_weights_at_an_index_that_the_compiler_knows(num_chunks):
    found, sizes = traced(num_chunks)
    stacks = {2 * num_chunks * size for size in sizes}  # of the two layers in each chunk of a stage
    loops = [
        equation
        for equation, _ in found
        if equation.primitive.name == "scan" and equation.params["length"] == 2
        and stacks & {var.aval.size for var in equation.invars if var.aval.dtype == jnp.bfloat16}
    ]  # fmt: skip
    assert len(loops) > 1, "of forward and of backward rows"
    for loop in loops:
        constants = [var for var in loop.invars if isinstance(var, Literal) and var.aval.dtype == jnp.int32]
        assert len(constants) == (1 if num_chunks == 1 else 0)


def test_layers_that_were_cast_before_compute_the_same_bits():
    given = config(1)
    task = decoder(given.model, batch_size=4, sequence_length=16, dtype=jnp.bfloat16)
    params = jax.tree.map(lambda box: box.unbox(), task.init(jax.random.key(0)), is_leaf=lambda x: hasattr(x, "unbox"))
    batch = {name: jnp.zeros(leaf.shape, leaf.dtype) for name, leaf in task.batch.items()}
    batch["sequence_index"] = jnp.arange(4)
    x = jax.random.normal(jax.random.key(1), (4, 16, given.model.embed_dim), jnp.bfloat16)
    run = jax.jit(lambda layers: task.stages.repeated(layers, x, batch, jax.random.key(2), 0, True)[0])
    late, early = run(params["layers"]), run(task.stages.cast(params["layers"]))
    assert early.dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.asarray(late, np.float32), np.asarray(early, np.float32))
