"""The convnet without a mesh: shifts and masks by an image's key, each image by itself, FLOPs, dtypes."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshtrain.examples.convnet import ConvnetOptions, convnet, flops_per_image, shift
from meshtrain.plan.cluster.traced_flops import traced_flops
from meshtrain.sharding.named import unbox
from meshtrain.sharding.rules import AXES

B = 8
OPTIONS = ConvnetOptions(filters=8, hidden=16, num_groups=4, height=6, width=5, channels=3, num_classes=7)
SIZE = (B, OPTIONS.height, OPTIONS.width, OPTIONS.channels)


def batch(start=0):
    random = np.random.default_rng(0)
    return {
        "images": random.integers(0, 256, SIZE).astype(np.uint8),
        "labels": random.integers(0, OPTIONS.num_classes, B).astype(np.int32),
        "weights": np.ones(B, np.float32),
        "sequence_index": np.arange(start, start + B, dtype=np.int32),
    }


@pytest.fixture(scope="module")
def computed():
    """A function (options, batch, train) -> (sum, weight, accuracy), compiled once for each `train`."""
    params = unbox(convnet(OPTIONS, batch_size=B).init(jax.random.key(0)))
    loss = jax.jit(convnet(OPTIONS, batch_size=B).loss, static_argnums=3)

    def values(given, train):
        total, weight, metrics = loss(params, given, jax.random.key(1), train)
        return float(total), float(weight), float(metrics["accuracy"])

    return values


def test_shifts_move_each_image_by_its_own_key_and_reach_every_place():
    images = np.arange(1, 13, dtype=np.uint8).reshape(1, 4, 3, 1).repeat(200, axis=0)
    moved = np.asarray(shift(jnp.asarray(images), jax.random.split(jax.random.key(0), 200), 1))
    padded = np.pad(images[0, ..., 0], 1)
    places = {padded[i : i + 4, j : j + 3].tobytes() for i in range(3) for j in range(3)}
    assert {image.tobytes() for image in moved} == places
    key = jax.random.split(jax.random.key(0), 200)[7:8]
    np.testing.assert_array_equal(shift(jnp.asarray(images[:1]), key, 1), moved[7:8])
    assert shift(images, key, 0) is images


def test_random_numbers_are_those_of_the_index_in_the_global_batch(computed):
    """And of nothing else: half of the batch with its own indices gives its share of the sum."""
    whole = computed(batch(), True)[0]
    weights = np.zeros((2, B), np.float32)
    weights[0, :4] = weights[1, 4:] = 1
    halves = [computed({**batch(), "weights": one}, True)[0] for one in weights]
    assert sum(halves) == pytest.approx(whole, rel=1e-6)
    turned = {name: np.roll(value, 3, axis=0) for name, value in batch().items()}
    assert computed(turned, True)[0] == pytest.approx(whole, rel=1e-6)
    assert abs(computed(batch(start=B), True)[0] / whole - 1) > 1e-4


def test_an_image_is_seen_by_itself(computed):
    """Statistics of a batch would let the others change what is computed for it."""
    first = np.zeros(B, np.float32)
    first[0] = 1
    other = batch()
    other["images"][1:] = 0
    alone, among = (computed({**given, "weights": first}, False) for given in (other, batch()))
    assert alone == among


@pytest.mark.parametrize("num_weighted", [B, B // 2])
def test_accuracy_counts_images_of_weight_one(computed, num_weighted):
    """Each image has one label that is right; the rows that pad a batch have weight 0."""
    weights = (np.arange(B) < num_weighted).astype(np.float32)
    every = [{**batch(), "weights": weights, "labels": np.full(B, label, np.int32)} for label in range(7)]
    sums = [computed(given, False) for given in every]
    assert [weight for _, weight, _ in sums] == [num_weighted] * 7
    assert sum(right for _, _, right in sums) == num_weighted


def test_the_first_loss_is_that_of_guessing(computed):
    assert computed(batch(), False)[0] / B == pytest.approx(np.log(OPTIONS.num_classes), rel=0.05)


@pytest.mark.parametrize("options", [OPTIONS, ConvnetOptions()], ids=["odd", "default"])
def test_the_flops_that_the_task_states_are_those_that_are_traced(options):
    task = convnet(options, batch_size=B)
    params = jax.eval_shape(lambda rng: unbox(task.init(rng)), jax.random.key(0))
    like = {name: jax.ShapeDtypeStruct(entry.shape, entry.dtype) for name, entry in task.batch.items()}
    like["sequence_index"] = jax.ShapeDtypeStruct((B,), jnp.int32)

    def total(params, batch):
        return task.loss(params, batch, jax.random.key(0), True)[0]

    traced = jax.make_jaxpr(jax.grad(total))(params, like)
    one_device = dict.fromkeys(AXES, 1)
    assert traced_flops(traced.jaxpr, one_device) == B * flops_per_image(options) == B * task.flops_per_token


def test_products_are_in_the_compute_dtype_and_the_loss_in_float32():
    task = convnet(dataclasses.replace(OPTIONS, dropout_rate=0.0), batch_size=B, dtype=jnp.bfloat16)
    params = unbox(task.init(jax.random.key(0)))
    traced = jax.make_jaxpr(lambda params: task.loss(params, batch(), jax.random.key(0), True))(params)
    products = [line for line in str(traced).splitlines() if "conv_general_dilated[" in line or "dot_general[" in line]
    assert len(products) == 4
    assert all(":bf16[" in line for line in products), products
    # Filters are 8, as is nothing else: the cast weights are kernels, not norms of [8].
    casts = [line for line in str(traced).splitlines() if "convert_element_type[new_dtype=bfloat16" in line]
    assert any(":bf16[3,3,3,8] " in line for line in casts)
    assert not any(":bf16[8] " in line for line in casts)
    assert {leaf.dtype.name for leaf in jax.tree.leaves((params, traced.out_avals))} == {"float32"}
