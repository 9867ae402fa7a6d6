"""What a task states about itself: the units of a batch, and the width that learning rates follow."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshtrain.assembly.optimization import learning_rates
from meshtrain.config.schema import Config
from meshtrain.errors import UserError
from meshtrain.models.task import (
    SEQUENCE_INDEX,
    Entry,
    Ratio,
    Task,
    check_after_update,
    check_loss,
    entries,
    token_batch,
    with_layer_sums,
)
from meshtrain.optim.learning_rate import LearningRateOptions

NOAM = Config(learning_rate=LearningRateOptions(name="noam", warmup_steps=10))


def task(**states):
    return Task(init=lambda rng: {}, loss=lambda *_: (0.0, 0.0, {}), batch=token_batch(4, 8), **states)


def test_noam_follows_the_width_of_the_task_and_not_the_decoders():
    narrow, wide = (learning_rates(NOAM, task(width=width))(jnp.int32(0)) for width in (64, 4096))
    np.testing.assert_allclose(narrow, 8 * wide, rtol=1e-6)  # width^-0.5
    assert NOAM.model.embed_dim not in (64, 4096)


def test_noam_is_refused_where_the_task_states_no_width():
    with pytest.raises(UserError, match=r"learning_rate\.name: got noam, .* nearest: inverse_sqrt"):
        learning_rates(NOAM, task())
    assert learning_rates(dataclasses.replace(NOAM, learning_rate=LearningRateOptions()), task())(0) > 0


@pytest.mark.parametrize(
    ("returned", "got"),
    [
        (jnp.float32(1), "got float32[] returned"),
        ((jnp.ones(3), jnp.float32(3)), "got ('float32[3]', 'float32[]') returned"),
        ((jnp.ones(3), jnp.float32(3), {}), "got ('float32[3]', 'float32[]', {}) returned"),
        ((1.0, 3.0, {"a": (1.0, 2.0)}), "got ('float32[]', 'float32[]', {'a': ('float32[]', 'float32[]')}) returned"),
        ((1.0, 3.0, {"a": Ratio(jnp.ones(3), 2.0)}), "got ('float32[]', 'float32[]', {'a': Ratio(sum='float32[3]', "),
        ((jnp.float32(1), jnp.float32(3), jnp.float32(3)), "got ('float32[]', 'float32[]', 'float32[]') returned"),
    ],
)
def test_a_loss_that_returns_something_else_is_refused_in_one_line(returned, got):
    with pytest.raises(UserError) as caught:
        check_loss(lambda *_: returned, "tokens")({}, {}, None, True)
    assert str(caught.value).startswith(f"Task.loss: {got}")
    assert "; allowed: a tuple of the sum" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("returned", "got"),
    [
        (
            {"layers": {"bias": jnp.ones(3)}},
            "got (3,) for layers/bias; allowed: the structure of its argument, with (2,) ",
        ),
        ({"layers": {}}, "got nothing for layers/bias; allowed: the structure of its argument, with (2,) there"),
        (
            {"layers": {"bias": jnp.ones(2)}, "own": 1.0},
            "got () for own; allowed: the structure of its argument, with noth",
        ),
    ],
)
def test_an_update_that_returns_other_parameters_is_refused_in_one_line(returned, got):
    params = {"layers": {"bias": jnp.zeros(2)}}
    with pytest.raises(UserError, match=r"^Task\.after_update: .*nearest: return ") as caught:
        check_after_update(lambda *_: returned)(params, {})
    assert got in str(caught.value)
    assert check_after_update(lambda params, _: params)(params, {}) is params


def test_sums_pass_as_they_are():
    sums = (jnp.float32(1), 3, {"correct": jnp.int32(2), "right": Ratio(jnp.float32(1), jnp.float32(2))})
    assert check_loss(lambda *_: sums, "tokens")({}, {}, None, True) is sums


def test_ratios_of_layers_are_added_to_those_of_the_head():
    loss = (jnp.float32(1), jnp.float32(2), {"a": Ratio(jnp.float32(3), jnp.float32(4)), "b": jnp.float32(5)})
    total, weight, metrics = with_layer_sums(
        loss, (jnp.float32(10), {"a": Ratio(jnp.float32(20), jnp.float32(30))}), ""
    )
    assert (total, weight, metrics) == (11, 2, {"a": Ratio(23, 34), "b": 5})


def test_units_of_a_batch():
    assert task().num_units == 32
    assert task(units_per_step=5).num_units == 5
    assert task(unit="documents").num_units == 4


def test_entries_have_axes_whatever_the_task_gives():
    plain = {"images": jax.ShapeDtypeStruct((4, 2, 2, 3), jnp.float32)}
    found = entries(dataclasses.replace(task(), batch=plain), 4)
    assert found["images"].axes == ("batch", None, None, None)
    assert entries(task(), 4)["tokens"].axes == ("batch", "sequence")


def test_entries_that_are_no_batch_are_refused_together():
    wrong = {
        "short": Entry((3, 8), jnp.int32, ("batch", "sequence")),
        "axes": Entry((4, 8), jnp.int32, ("batch",)),
        "first": Entry((4,), jnp.int32, ("sequence",)),
        SEQUENCE_INDEX: Entry((4,), jnp.int32, ("batch",)),
        "fine": Entry((4,), jnp.int32, ("batch",)),
    }
    with pytest.raises(UserError) as caught:
        entries(dataclasses.replace(task(), batch=wrong), 4)
    named = [line.partition(":")[0] for line in caught.value.problems]
    assert named == [f"Task.batch['{name}']" for name in ("short", "axes", "first", SEQUENCE_INDEX)]
    assert caught.value.problems[0].endswith("nearest: Entry((4, 8), int32, ('batch', 'sequence'))")
    with pytest.raises(UserError, match=r"Task\.unit: got 'two words'; .* nearest: images"):
        entries(task(unit="two words"), 4)
    with pytest.raises(UserError, match=r"Task\.batch: got no entry"):
        entries(dataclasses.replace(task(), batch={}), 4)
