"""Adapters beside the matrices of a model: what they start as, what they add, and the weights that they merge into."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from meshtrain.models import lora
from meshtrain.models.lora import LoraOptions, with_adapters
from meshtrain.models.task import SEQUENCE_INDEX
from meshtrain.models.transformer.decoder import DecoderOptions
from meshtrain.models.transformer.task import decoder
from meshtrain.sharding.named import unbox
from meshtrain.sharding.param_sharding import params_with_axes
from meshtrain.sharding.trainable import is_adapter, trainable_mask
from meshtrain.sharding.trees import leaves_with_paths, merge, select

B, T, VOCABULARY = 2, 6, 11
SIZES = {"num_layers": 2, "embed_dim": 16, "mlp_dim": 24, "num_heads": 4, "vocab_size": VOCABULARY, "init_std": 0.5}
LORA = LoraOptions(rank=3, alpha=4.5)
MATRICES = [*(f"attention/{name}" for name in ("key", "output", "query", "value")), "mlp/down", "mlp/gate", "mlp/up"]


@functools.cache
def base():
    return decoder(DecoderOptions(**SIZES, num_kv_heads=2, biases=True), batch_size=B, sequence_length=T)


def batch(task):
    generator = np.random.default_rng(0)
    ids = {"tokens", "targets", "source_tokens"}
    entries = {
        name: generator.integers(0, VOCABULARY, entry.shape) if name in ids else np.ones(entry.shape)
        for name, entry in task.batch.items()
    }
    of_entries = {name: entries[name].astype(entry.dtype) for name, entry in task.batch.items()}
    return {**of_entries, SEQUENCE_INDEX: np.arange(B, dtype=np.int32)}


def initial(task):
    return unbox(jax.jit(task.init)(jax.random.key(0)))


def moved(params):
    """The parameters with random numbers in place of the zeros of each B."""
    generator = np.random.default_rng(1)
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: (
            generator.normal(size=leaf.shape).astype(np.float32) if path[-1].key.endswith("_lora_b") else leaf
        ),
        params,
    )


def loss_of(task):
    return lambda params: task.loss(params, batch(task), jax.random.key(0), False)[0]


def test_the_first_loss_and_the_other_weights_are_those_without_adapters_bitwise(exact_bits):
    task = with_adapters(base(), LORA)
    before, params = initial(base()), initial(task)
    jax.tree.map(np.testing.assert_array_equal, lora.merge_adapters(params, LORA), before)
    assert jax.jit(loss_of(task))(params) == jax.jit(loss_of(base()))(before)
    assert task.num_parameters - base().num_parameters == sum(
        leaf.size for path, leaf in leaves_with_paths(params) if is_adapter(path)
    )


def test_loss_and_gradients_are_those_of_the_merged_weights():
    assert_like_merged(base())


def assert_like_merged(plain):
    """The reference computes W + (alpha / r) A B, and differentiates through the sum."""
    task = with_adapters(plain, LORA)
    start = initial(task)
    params = moved(start)
    adapters, frozen = select(params, trainable_mask("", params, has_adapters=True))

    @jax.jit
    @jax.value_and_grad
    def of_adapters(adapters, frozen):
        return loss_of(task)(merge(adapters, frozen))

    @jax.jit
    @jax.value_and_grad
    def of_merged(adapters, frozen):
        return loss_of(plain)(lora.merge_adapters(merge(adapters, frozen), LORA))

    loss, found = of_adapters(adapters, frozen)
    expected_loss, expected = of_merged(adapters, frozen)
    assert float(loss) == pytest.approx(float(expected_loss), rel=1e-5)
    assert abs(loss - of_merged(*select(start, trainable_mask("", start, has_adapters=True)))[0]) > 1e-2 * loss
    for (path, got), (_, wanted) in zip(leaves_with_paths(found), leaves_with_paths(expected), strict=True):
        assert np.linalg.norm(wanted) > 0, path
        assert np.linalg.norm(got - wanted) <= 1e-5 * np.linalg.norm(wanted), path


@pytest.mark.parametrize("options", [LORA, dataclasses.replace(LORA, rank_stabilized=True)])
def test_logits_of_merged_weights_are_those_of_the_adapters(options):
    task = with_adapters(base(), options)
    start, params = initial(task), moved(initial(task))
    plain = jax.jit(base().logits)
    logits = jax.jit(task.logits)(params, batch(task))[..., :VOCABULARY]
    of_merged, of_start = (
        plain(lora.merge_adapters(some, options), batch(task))[..., :VOCABULARY] for some in (params, start)
    )
    largest = np.abs(logits).max()
    np.testing.assert_allclose(of_merged, logits, atol=1e-5 * largest)
    assert np.abs(of_start - logits).max() > 0.1 * largest


@pytest.mark.parametrize(
    ("targets", "adapted"),
    [
        ("", MATRICES),
        ("query|value", ["attention/query", "attention/value"]),
        ("attention", MATRICES[:4]),  # biases have no product
        ("layers/mlp/up$", ["mlp/up"]),
    ],
)
def test_targets_are_found_in_the_paths_of_matrices(targets, adapted):
    params, axes = params_with_axes(with_adapters(base(), LoraOptions(rank=3, targets=targets)).init)
    found = {path.removesuffix("_lora_a") for path, _ in leaves_with_paths(params) if path.endswith("_lora_a")}
    assert found == {f"layers/{path}" for path in adapted}
    stored = {"embed", "adapter_head_dim", "adapter_mlp"}
    for name, leaf in {**axes["layers"]["attention"], **axes["layers"]["mlp"]}.items():
        assert not is_adapter(name) or len(stored & set(leaf)) == 1, "each factor has one dim that fsdp splits"


@pytest.mark.parametrize("targets, most", [("", 16), ("key|value", 8)])
def test_a_rank_is_at_most_that_of_the_largest_matrix(targets, most):
    params, axes = params_with_axes(base().init)
    assert lora.problems(LoraOptions(rank=most, targets=targets), params, axes) == []
    [line] = lora.problems(LoraOptions(rank=10**9, targets=targets), params, axes)
    assert line.startswith(f"lora.rank: got 1000000000; allowed: at most {most}, ")
    assert line.endswith(f"; nearest: {most}")
