"""For `accelerator`: measures the shares of the device's peaks that kernels reach; plans assume these shares.

R: rows of all experts, E: experts, D, F: dims of an expert's weight.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from meshtrain.files import JsonObject
from meshtrain.hardware.accelerators import find, peak_flops_per_second
from meshtrain.launch import distributed
from meshtrain.models.attention import dot_product
from meshtrain.models.attention.attention import Attention
from meshtrain.models.moe import grouped_matmul
from scripts.benchmarks.attention import HEAD_DIM, NUM_HEADS, NUM_KV_HEADS, WAYS, seconds

# `flex` is measured by `scripts/bench attention --measure`, with documents.
ATTENTION = {"cudnn": functools.partial(dot_product.attend, how="cudnn")} | {
    way: attend for way, attend in WAYS.items() if way != "flex"
}
WITHOUT_KERNEL = ("xla", "blockwise")  # implementations that every device has
BLOCK_ROWS = 128


def rates(tiny: bool, before: Mapping[str, Any]) -> JsonObject:
    """Returns operations per second over the device's bfloat16 peak, and bytes per second over the memory's peak.

    `product` is a product of two large matrices. Attention's operations, forward and backward, count causal pairs.
    `experts` is the product of grouped rows with Qwen3-30B-A3B's shapes, forward and backward; the name ends in the
    number of experts on a device. `batched` is the same work by XLA's batched product, with an equal number of rows for
    each expert. If a device's peaks are not known, the values are operations per second.
    """
    [device, *_], _ = distributed.start(1)
    platform, accelerator = jax.default_backend(), find(device.device_kind)
    peak = peak_flops_per_second(device.device_kind, "bfloat16") or 1.0
    size, length, num_rows = (256, 256, 512) if tiny else (8192, 8192, 65536)
    found: JsonObject = {"product": 2 * size**3 / seconds(jnp.dot, normal(size, size), normal(size, size)) / peak}
    wide = jnp.ones((size, size, 2), jnp.float32)
    memory = accelerator.memory_bytes_per_second if accelerator else 1.0
    found["memory"] = 2 * wide.nbytes / seconds(lambda x: x + 1, wide) / memory
    for way in ATTENTION if platform == "gpu" else WITHOUT_KERNEL:
        found[f"attention_{way}"] = attention_rate(ATTENTION[way], length) / peak
    for num_experts in (4,) if tiny else (16, 128):
        grouped, batched = (experts_rate(num_rows, num_experts, platform, how) for how in (False, True))
        found[f"experts_of_{num_experts}"], found[f"batched_of_{num_experts}"] = grouped / peak, batched / peak
    return found


def normal(*shape: int) -> jax.Array:
    """Returns random bfloat16 of this shape; zeros would take less power and make products faster."""
    return jax.random.normal(jax.random.key(len(shape)), shape, jnp.bfloat16)


def attention_rate(attend: Callable[..., jax.Array], length: int) -> float:
    """Returns operations per second of causal attention and its gradients: two products forward, five backward."""
    attention = Attention(NUM_HEADS, NUM_KV_HEADS, HEAD_DIM)
    q, k = (normal(1, length, heads, HEAD_DIM) for heads in (NUM_HEADS, NUM_KV_HEADS))

    def both(q: jax.Array, k: jax.Array, v: jax.Array) -> Any:
        heads, backward = jax.vjp(lambda *qkv: attend(*qkv, None, attention), q, k, v)
        return backward(heads)

    return 7 * NUM_HEADS * HEAD_DIM * length**2 / seconds(both, q, k, k)


def experts_rate(num_rows: int, num_experts: int, platform: str, batched: bool) -> float:
    """Returns operations per second of the products of rows with their experts' weights, and of both gradients."""
    rows, weights = normal(num_rows, 2048), normal(num_experts, 2048, 768)
    owners = jnp.repeat(jnp.arange(num_experts, dtype=jnp.int32), num_rows // BLOCK_ROWS // num_experts)

    def product(rows: jax.Array, weights: jax.Array) -> jax.Array:
        if batched:
            return jnp.einsum("erd,edf->erf", rows.reshape(num_experts, -1, 2048), weights).reshape(num_rows, -1)
        return grouped_matmul.product(rows, weights, owners, platform=platform)

    def both(rows: jax.Array, weights: jax.Array) -> Any:
        result, backward = jax.vjp(product, rows, weights)
        return backward(result)

    return 6 * num_rows * 2048 * 768 / seconds(both, rows, weights)
