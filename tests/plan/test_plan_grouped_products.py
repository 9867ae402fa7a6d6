"""FLOPs of products in blocks of one expert each: blocks that have rows count, in kernels as in loops."""

import functools

import jax
import jax.numpy as jnp
import pytest

from meshtrain.models.moe.grouped_matmul import WITH_ROWS, How, compute_blocks, product
from meshtrain.plan.cluster.traced_flops import attention_kernel, traced_flops
from meshtrain.plan.hlo import flops, parse
from meshtrain.plan.hlo.products import Product, is_product, product_of
from meshtrain.plan.timing.streams import Assumptions, _ends
from tests.plan import recorded
from tests.plan.conftest import H100

E, D, F, M, BLOCKS, USED = 4, 256, 128, 16, 10, 5
ONE = 2 * USED * M * D * F  # a product of all rows, or the weights' cotangent
SHARES = {WITH_ROWS: USED / BLOCKS}


def read(text):
    return parse.read(text, shares=SHARES)


def shapes(dtype=jnp.float32):
    """The shapes of rows, weights and owners."""
    of_rows = jax.ShapeDtypeStruct((BLOCKS * M, D), dtype)
    return of_rows, jax.ShapeDtypeStruct((E, D, F), dtype), jax.ShapeDtypeStruct((BLOCKS,), jnp.int32)


def gradients(how, runs_again, rows, weights, owners):
    """The gradients of two layers, as a scan; rows have as many columns as products."""
    way = lambda rows, weights: jnp.sin(compute_blocks(how, rows, weights, owners))  # noqa: E731
    way = jax.checkpoint(way) if runs_again else way
    loss = lambda rows, weights: jnp.sum(jax.lax.scan(lambda x, w: (way(x, w), None), rows, weights)[0])  # noqa: E731
    return jax.grad(loss, argnums=(0, 1))(rows, weights)


@pytest.mark.parametrize("runs_again", [False, True], ids=["once", "again"])
@pytest.mark.parametrize("kernel", ["gpu", "tpu", "loop"])
def test_traced_products_are_those_of_blocks_that_have_rows(kernel, runs_again):
    how, owners = How(kernel), shapes()[2]
    rows, weights = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((BLOCKS * M, D), (2, E, D, D)))
    jaxpr = jax.make_jaxpr(functools.partial(gradients, how, runs_again))(rows, weights, owners).jaxpr
    assert traced_flops(jaxpr, {"data": 1}, SHARES) == 2 * (4 if runs_again else 3) * ONE * D // F
    assert attention_kernel(jaxpr) == "xla", "a kernel of another kind, or without a name"


def test_a_compiled_loop_counts_them_too():
    way = jax.jit(product)
    given = jax.make_jaxpr(way)(*shapes()).jaxpr
    assert traced_flops(given, {"data": 1}, SHARES) == ONE
    assert flops.matmul_flops(read(way.lower(*shapes()).compile().as_text())).products == ONE


TIMES = """\
%call.1 = f32[160,128]{1,0} custom-call(%owners, %rows, %weights), custom_call_target="__gpu$xla.gpu.triton", \
metadata={op_name="jit(step)/jvp(blocks_with_rows)/times_of_blocks/pallas_call"}, \
backend_config={grid_x = 1 : i32, name = "times_of_blocks"}"""
OF_WEIGHTS = TIMES.replace("times_of", "weights_of").replace("%weights)", "%cotangent)").replace("160,128", "4,256,128")
ARGUMENTS = (
    "%owners = s32[10]{0} parameter(0)",
    "%rows = f32[160,256]{1,0} parameter(1)",
    "%weights = f32[4,256,128]{2,1,0} parameter(2)",
    "%cotangent = f32[160,128]{1,0} parameter(3)",
)


@pytest.mark.parametrize("target", ["__gpu$xla.gpu.triton", "triton_kernel_call_ffi", "tpu_custom_call"])
@pytest.mark.parametrize(
    ("line", "product"),
    [(TIMES, Product(1, USED * M, F, D)), (OF_WEIGHTS, Product(E, D, F, USED * M // E))],
    ids=["times", "weights"],
)
def test_a_kernel_s_call_is_counted_by_its_name_and_scope(line, product, target):
    program = read(recorded.entry(*ARGUMENTS, line.replace("__gpu$xla.gpu.triton", target)))
    assert flops.matmul_flops(program).products == ONE
    (call,) = [row[0] for row in program.instructions("custom-call")]
    assert is_product(call)
    of_operands = {name: text.split()[2] for name, text in zip(
        ("owners", "rows", "weights", "cotangent"), ARGUMENTS, strict=True
    )}  # fmt: skip
    assert product_of(call, of_operands, SHARES) == product


def test_another_kernel_counts_nothing_and_one_without_dims_is_refused():
    other = TIMES.replace("times_of_blocks", "another")
    assert flops.matmul_flops(read(recorded.entry(*ARGUMENTS, other))).products == 0
    short = TIMES.replace("(%owners, %rows, %weights)", "(%owners)")
    with pytest.raises(ValueError, match=r"%call.1: products of blocks whose dims are not known"):
        flops.matmul_flops(read(recorded.entry(*ARGUMENTS, short)))


def test_kernels_of_experts_may_be_slower_than_other_products_at_the_slow_end_alone():
    arguments = [
        line.replace("f32", "bf16").replace("160,256", "65536,4096").replace("4,256,128", "4,4096,8192")
        for line in ARGUMENTS[:3]
    ]
    text = recorded.entry(*arguments, TIMES.replace("f32[160,128]", "bf16[65536,8192]"))
    assumed, share = Assumptions(), H100.product_share
    low, high = _ends(read(text), H100, {}, assumed)
    slower = (share + assumed.product_faster) / (share - assumed.product_slower) / assumed.slow_grouped_efficiency
    assert high - assumed.slow_launch_seconds == pytest.approx(slower * (low - assumed.launch_seconds))
    assert assumed.interval_line(H100, is_calibrated=False).endswith("experts' at 34%, 7 us a kernel and none hidden")
