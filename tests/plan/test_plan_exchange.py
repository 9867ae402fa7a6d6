"""What attention sends along context, by formula."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from meshtrain.config.build import default
from meshtrain.config.mesh_checks import units_on_device
from meshtrain.config.resolve import resolve
from meshtrain.config.schema import Config
from meshtrain.config.tasks import abstract_task
from meshtrain.models.remat import RematOptions
from meshtrain.models.task import Entry, Task
from meshtrain.plan.cost import lower_bound
from meshtrain.plan.hlo.collectives import Traffic, sent_along
from meshtrain.sharding.rules import AXES, LayoutOptions, default_rules
from meshtrain.step.precision import PrecisionOptions
from tests.plan.conftest import assembled, shape_of

BFLOAT16 = PrecisionOptions("bfloat16")
ONE_HEAD = 1000 * 16 * 2  # a thousand tokens of a head of 16, in bfloat16
MATRICES = 2 * (4 * 64 * 64 + 3 * 64 * 128)  # of the small model's layers
TABLE_AND_HEAD = 2 * 256 * 64


@pytest.mark.parametrize(
    ("sizes", "kv_heads", "remat", "expected"),
    [
        ({"fsdp": 8}, 4, RematOptions("none"), 0),
        ({"context": 2}, 4, RematOptions("none"), 2 * 2 * 16 / 2),
        ({"context": 4}, 2, RematOptions("none"), 2 * 2 * 16 * 3 / 4),  # two heads for four devices: each twice
        ({"context": 2}, 2, RematOptions("none"), 2 * 2 * 12 / 2),
        ({"context": 2, "tensor": 2}, 4, RematOptions("none"), 2 * 2 * 16 / 2 / 2),
        ({"context": 2, "pipeline": 2}, 4, RematOptions("none"), 2 * 16 / 2),
        ({"context": 2}, 4, RematOptions("full"), 2 * 3 * 16 / 2),
        ({"context": 2}, 4, RematOptions("full", every=2), 2 * 2.5 * 16 / 2),
    ],
    ids=str,
)
def test_an_exchange_sends_queries_keys_values_and_heads_each_pass(small, sizes, kv_heads, remat, expected):
    """Heads a token, of 4 query heads: (2 x 4 + 2 x key and value heads) x layers x passes x (n - 1) / n."""
    model = dataclasses.replace(small().model, num_kv_heads=kv_heads)
    config = small(model=model, remat=remat, precision=BFLOAT16)
    assert abstract_task(config).cost(shape_of(**sizes), 1000).layer_bytes["context"] == expected * ONE_HEAD


@pytest.mark.parametrize(("name", "source"), [("seq2seq", "numbers"), ("convnet", "digits")])
def test_what_other_tasks_exchange_is_not_known(name, source):
    config = resolve(default(name), {"data.source": source})
    assert "context" not in abstract_task(config).cost(shape_of(context=2), 1000).layer_bytes


def test_tokens_are_split_where_the_batch_has_sequences():
    tokens = {"tokens": Entry((8, 16), jnp.int32, ("batch", "sequence"))}
    images = {"images": Entry((8, 4, 4, 1), jnp.float32, ("batch", "height", "width", "channels"))}
    shapes = {"rows": jax.ShapeDtypeStruct((8, 16), jnp.int32)}
    sizes, rules = dict(zip(AXES, (2, 3, 5, 7, 11, 13), strict=True)), default_rules(LayoutOptions())
    of_batch = sizes["data"] * sizes["fsdp"] * sizes["expert"]
    for batch, parts in ((tokens, of_batch * sizes["context"]), (images, of_batch), (shapes, of_batch)):
        task = Task(lambda rng: {}, len, batch, units_per_step=parts)
        assert units_on_device(Config(batch_size=8), task, rules, sizes) == 1


def test_weights_are_one_entry_over_all_axes_that_store_them_and_the_exchange_is_one_of_its_own(small):
    least = lower_bound.wire_bytes_minimum(assembled(small(precision=BFLOAT16), fsdp=2, context=4))
    of_weights = 7 / 8 * 2 * (3 * MATRICES + 2 * TABLE_AND_HEAD)
    assert least == {"fsdp+context": of_weights, "context": 3 / 4 * 2 * 2 * 16 * 64 * 16 * 2}


def test_without_fsdp_both_are_one_entry(small):
    least = lower_bound.wire_bytes_minimum(assembled(small(precision=BFLOAT16), context=4, data=2))
    of_weights = 3 / 4 * 2 * (3 * MATRICES + 2 * TABLE_AND_HEAD)
    assert least["context"] == of_weights + 3 / 4 * 2 * 2 * 16 * 64 * 16 * 2


def test_activations_that_tensor_and_pipeline_send_are_parts_of_sequences(small):
    whole, parts = (
        lower_bound.wire_bytes_minimum(assembled(small(), tensor=2, pipeline=2, **{axis: 2}))
        for axis in ("fsdp", "context")
    )
    assert (whole["tensor"], whole["pipeline"]) == (parts["tensor"], parts["pipeline"])


def test_idle_rows_exchange_as_well(small):
    assembly = assembled(small(), pipeline=2, fsdp=2, context=2)
    least = lower_bound.wire_bytes_minimum(assembly)
    idle = lower_bound.idle_bytes(assembly, least)
    assert idle["context"] == pytest.approx(least["context"] / 3)
    alone = assembled(small(), pipeline=2, context=4)
    both = lower_bound.wire_bytes_minimum(alone)
    outer = 2 * 2 * 4 * 3 / 8 * TABLE_AND_HEAD  # of two microbatches: table and head gathered and scattered, float32
    assert lower_bound.idle_bytes(alone, both)["context"] == pytest.approx((both["context"] - outer) / 3)


def test_what_runs_along_context_alone_is_not_sent_for_weights():
    rows = [
        Traffic(axis, "all-gather", 1, size, size, 1.0, 1.0, ())
        for axis, size in (("context", 1.0), ("fsdp", 2.0), ("fsdp+context", 4.0))
    ]
    assert [sent_along(rows, axes) for axes in ("context", "fsdp+context", "fsdp")] == [1.0, 6.0, 2.0]
