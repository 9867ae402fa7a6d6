"""Products in blocks, compiled for GPUs and TPUs that are not there: `scripts/test --plan` runs this."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from meshtrain.models.blocks import arranged, product
from meshtrain.plan import flops, hlo
from meshtrain.plan.topology import open_cluster
from meshtrain.plan.traced import traced_flops

pytestmark = pytest.mark.gpu_compiler

CHOICES, M = 8192, 128


def step(platform, rows, weights, chosen, cotangent):
    """The products of the rows of these choices, and the gradients of rows and weights."""
    owners = arranged(chosen, weights.shape[0], M).owners
    result, pull = jax.vjp(lambda rows, weights: product(rows, weights, owners, platform=platform), rows, weights)
    return result, pull(cotangent)


@pytest.mark.parametrize(
    ("card", "weights", "dtype"),
    [
        ("h100:1x1", (16, 2048, 768), jnp.bfloat16),
        ("h100:1x1", (8, 4096, 14336), jnp.bfloat16),
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
    program = way.trace(cluster.platform, *given).lower(lowering_platforms=(cluster.platform,)).compile()
    active = 3 * 2 * CHOICES * height * width
    padded = 3 * 2 * num_experts * M // 2 * height * width
    work = flops.matmul_flops(hlo.read(program.as_text()))
    assert work.products == active + padded
    assert traced_flops(jax.make_jaxpr(way, static_argnums=0)(cluster.platform, *given).jaxpr, {}) == work.products
    # On TPUs the products of blocks without rows become zeros in a copy.
    copied = jnp.dtype(dtype).itemsize * num_rows * (height + width) if cluster.platform == "tpu" else 0
    assert program.memory_analysis().temp_size_in_bytes <= copied + 2**21
