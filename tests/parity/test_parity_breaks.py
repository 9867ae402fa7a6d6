"""Parity that could not fail would say nothing: each break here has to be noticed by the same comparison."""

import dataclasses
from collections.abc import Callable

import flax.errors
import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec

from meshtrain.layout import placement, replicas
from meshtrain.models import losses
from meshtrain.models.task import SEQUENCE_INDEX
from meshtrain.step import step as steps


@pytest.fixture
def noticed(base, trained, one_device, assert_same) -> Callable[..., bool]:
    """Whether a run on a mesh, broken by now, differs from one device or does not even run."""

    def run(seed_of_cache: int, **axes: int) -> bool:
        # A number that changes nothing but the key under which results are remembered.
        config = dataclasses.replace(base, log_every=1000 + seed_of_cache)
        try:
            assert_same(trained(config, **axes), one_device)
        except (AssertionError, ValueError, TypeError, flax.errors.FlaxError):
            return True
        return False

    return run


def test_dropped_gradient_reduction_is_noticed(monkeypatch, noticed):
    broken = jax.custom_vjp(lambda x, axis: x, nondiff_argnums=(1,))
    broken.defvjp(lambda x, axis: (x, None), lambda axis, _, cotangent: (cotangent,))
    monkeypatch.setattr(losses, "copy_to_shards", broken)
    assert noticed(1, pipeline=2)


def test_reduction_done_twice_is_noticed(monkeypatch, noticed):
    """Differentiating through a psum gives gradients that are too large by the size of the axis."""
    monkeypatch.setattr(losses, "sum_over_shards", lambda x, axis: x if axis is None else jax.lax.psum(x, axis))
    assert noticed(2, pipeline=2)


def test_wrong_dropout_key_is_noticed(monkeypatch, noticed):
    def index_in_microbatch(batch):
        num_sequences = batch["tokens"].shape[0]
        return {**batch, SEQUENCE_INDEX: jnp.arange(num_sequences, dtype=jnp.int32) // 2}

    monkeypatch.setattr(steps, "with_sequence_index", index_in_microbatch)
    assert noticed(3, data=2)


def test_swapped_spec_is_noticed(monkeypatch, noticed):
    right = placement.manual_specs

    def swapped(specs, axes):
        is_spec = lambda leaf: isinstance(leaf, PartitionSpec)  # noqa: E731
        turn = lambda spec: PartitionSpec(*reversed(spec)) if len(spec) == 2 else spec  # noqa: E731
        return jax.tree.map(turn, right(specs, axes), is_leaf=is_spec)

    monkeypatch.setattr(placement, "manual_specs", swapped)
    assert noticed(4, pipeline=2)


def test_replicas_that_do_not_meet_are_noticed(monkeypatch, noticed):
    monkeypatch.setattr(replicas.Replicas, "_scattered", lambda self, x, dim: x)
    assert noticed(6, data=2)


def test_nothing_broken_is_not_noticed(noticed):
    assert not noticed(5, pipeline=2)
