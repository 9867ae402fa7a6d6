"""Products in blocks, compiled for GPUs and TPUs that are not there: `scripts/test --plan` runs this."""

import collections
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from meshtrain.config.schema import Config
from meshtrain.models.decoder_options import MoeOptions
from meshtrain.models.moe import grouped_matmul_gpu
from meshtrain.models.moe.grouped_matmul import WITH_ROWS, arrange_blocks, product
from meshtrain.models.transformer.decoder import DecoderOptions
from meshtrain.plan.cluster.attention_tracing import as_on_target
from meshtrain.plan.cluster.clusters import open_cluster
from meshtrain.plan.cluster.compile import program_of
from meshtrain.plan.cluster.traced_flops import traced_flops
from meshtrain.plan.hlo import flops, parse, products
from meshtrain.sharding.mesh import MeshOptions
from meshtrain.sharding.placement import Placement
from meshtrain.sharding.rules import LayoutOptions, default_rules
from meshtrain.step.precision import PrecisionOptions
from tests.plan.conftest import planned

pytestmark = pytest.mark.gpu_compiler

CHOICES, M = 8192, 128


def step(platform, rows, weights, chosen, cotangent):
    """The products of the rows of these choices, and the gradients of rows and weights."""
    owners = arrange_blocks(chosen, weights.shape[0], M).owners
    result, pull = jax.vjp(lambda rows, weights: product(rows, weights, owners, platform=platform), rows, weights)
    return result, pull(cotangent)


@pytest.mark.parametrize(
    ("card", "weights", "dtype"),
    [
        ("h100:1x1", (16, 2048, 768), jnp.bfloat16),
        ("a100:1x1", (16, 2048, 768), jnp.float32),
        ("v5e:2x2", (16, 2048, 768), jnp.float32),
        ("v6e:2x2", (8, 4096, 14336), jnp.bfloat16),
    ],
)
def test_the_work_is_that_of_active_rows_and_padding_and_nothing_is_stored_beside_the_results(card, weights, dtype):
    cluster, (num_experts, height, width) = open_cluster(card), weights
    mesh = Mesh(np.asarray(cluster.devices[:1]), ("data",), axis_types=(AxisType.Auto,))
    num_rows = CHOICES + num_experts * M
    shapes = [((num_rows, height), dtype), (weights, dtype), ((CHOICES,), jnp.int32), ((num_rows, width), dtype)]
    given = [jax.ShapeDtypeStruct(*shape, sharding=NamedSharding(mesh, PartitionSpec())) for shape in shapes]
    way = jax.jit(step, static_argnums=0)
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):  # Triton reads the kind of the target's device there
        program = way.trace(cluster.platform, *given).lower(lowering_platforms=(cluster.platform,)).compile()
    active = 3 * 2 * CHOICES * height * width
    padded = 3 * 2 * num_experts * M // 2 * height * width
    shares = {WITH_ROWS: (CHOICES / M + num_experts / 2) / (CHOICES / M + num_experts)}
    work = flops.matmul_flops(parse.read(program.as_text(), shares=shares))
    assert work.products == pytest.approx(active + padded)
    traced = jax.make_jaxpr(way, static_argnums=0)(cluster.platform, *given).jaxpr
    assert traced_flops(traced, {}, shares) == pytest.approx(work.products)
    # On TPUs the products of blocks without rows become zeros in a copy.
    copied = jnp.dtype(dtype).itemsize * num_rows * (height + width) if cluster.platform == "tpu" else 0
    assert program.memory_analysis().temp_size_in_bytes <= copied + 2**21


def test_without_triton_jax_s_kernels_by_mosaic_are_compiled_in_a_region_of_scanned_layers(monkeypatch):
    """Two devices, each with 16 experts of its own; both products with weights and both gradients of each layer."""
    monkeypatch.setattr(grouped_matmul_gpu, "is_available", lambda: False)
    cluster, num_layers, num_rows, (num_experts, height, width) = open_cluster("h100:1x2"), 2, 8192, (16, 512, 256)
    mesh = Mesh(np.asarray(cluster.devices), ("expert",), axis_types=(AxisType.Auto,))
    capability = Placement(default_rules(LayoutOptions()), mesh).compute_capability
    times = functools.partial(product, platform=cluster.platform, capability=capability)

    def loss(weights, rows, chosen):
        def layer(rows, weights, chosen):
            owners = arrange_blocks(chosen, num_experts, M).owners
            inner = times(rows, weights[0], owners)
            return rows + times(jnp.tanh(inner), weights[1], owners)

        spec = PartitionSpec("expert")
        run = jax.shard_map(layer, mesh=mesh, in_specs=(spec, (spec, spec), spec), out_specs=spec, check_vma=False)
        again = jax.checkpoint(lambda rows, weights: run(rows, weights, chosen), prevent_cse=False)
        rows, _ = jax.lax.scan(lambda rows, weights: (again(rows, weights), None), rows, weights)
        return jnp.sum(rows.astype(jnp.float32))

    def given(shape, dtype, *spec):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, PartitionSpec(*spec)))

    matrices = [(num_layers, 2 * num_experts, *dims) for dims in ((height, width), (width, height))]
    weights = tuple(given(shape, jnp.bfloat16, None, "expert") for shape in matrices)
    num_choices = num_rows - num_experts * M
    rows, chosen = given((2 * num_rows, height), jnp.bfloat16, "expert"), given((2 * num_choices,), jnp.int32, "expert")
    with as_on_target(cluster), jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        traced = jax.jit(jax.grad(loss, argnums=(0, 1))).trace(weights, rows, chosen)
        text = traced.lower(lowering_platforms=("cuda",)).compile().as_text()
    program, kinds = parse.read(text), collections.Counter()
    for name, body in program.computations.items():
        kinds.update({products.grouped_kernel(line): program.num_runs[name] for line in body if "mosaic" in line.rest})
    # Of a layer: two products forward, both again in the backward pass (the second is not needed), two for rows.
    assert kinds["weights"] == 2 * num_layers
    assert kinds["times"] >= 2 * (2 + 1) * num_layers - num_layers
    work = flops.matmul_flops(parse.read(text, shares={WITH_ROWS: 1.0}))
    assert work.products == (kinds["times"] + kinds["weights"]) * 2 * num_rows * height * width


def test_a_step_on_an_expert_axis_counts_an_even_load_and_none_of_the_room_beyond():
    """Four devices have the tokens of all four, and room for all of their choices."""
    model = DecoderOptions(
        num_layers=2,
        embed_dim=512,
        num_heads=4,
        num_kv_heads=2,
        vocab_size=1024,
        moe=MoeOptions(num_experts=8, experts_per_token=2, expert_dim=256),
    )
    config = Config(
        batch_size=8,
        sequence_length=1024,
        model=model,
        mesh=MeshOptions(fsdp=2, expert=4),
        precision=PrecisionOptions("bfloat16"),
    )
    plan = planned("h100:1x8", config)
    assert plan.added_share == pytest.approx(0, abs=0.001)
    program, num_calls = program_of(plan.compiled), 0
    for name, body in program.computations.items():
        shapes = {line.name: line.shape for line in body}
        for line in body:
            if products.grouped_kernel(line):
                found = products.product_of(line, shapes, program.shares)
                # Two choices of each of 1,024 tokens, and half a block of padding for each of two experts.
                assert (found.contracted * found.batch if found.batch == 2 else found.rows) == 2048 + M
                num_calls += program.num_runs[name]
    # Of two layers: three matrices forward, and two gradients of each.
    assert num_calls >= 2 * 3 * 3
