"""What a configuration names and does not read: inputs are refused, options are listed, and the list is true."""

import dataclasses

import jax
import numpy as np
import pytest

from meshtrain.cli import flags
from meshtrain.config import unused_options
from meshtrain.config.build import default
from meshtrain.config.resolve import resolve
from meshtrain.config.schema import Config
from meshtrain.models.transformer.decoder import DecoderOptions
from meshtrain.optim.learning_rate import NAMES as RATES
from meshtrain.optim.learning_rate import LearningRateOptions, learning_rate
from meshtrain.optim.optimizers import NAMES as OPTIMIZERS
from meshtrain.optim.optimizers import OptimizerOptions, optimizer
from meshtrain.options import unused
from meshtrain.sharding.rules import AXES

pytestmark = pytest.mark.quick


def without_effect(*overrides, **shape):
    config = resolve(default(), dict(one.split("=", 1) for one in overrides), reads_data=False)
    sizes = dict.fromkeys(AXES, 1) | shape
    return unused_options.without_effect(config, sizes)


@pytest.mark.parametrize(
    ("overrides", "why", "shape"),
    [
        (["pipeline.schedule=gpipe"], "mesh.pipeline=1", {"pipeline": 2}),
        (["pipeline.num_microbatches=16"], "mesh.pipeline=1", {"pipeline": 2}),
        (["zero.level=2"], "mesh.data=1", {"data": 2}),
        (["reduction.name=int8"], "mesh.data=1", {"data": 2}),
        (["zero.strategy=shard_grad_op"], "mesh.data=1", {"fsdp": 2}),
        (["zero.strategy=full_shard"], "mesh.data=1", {"data": 2}),
        (["layout.sequence_parallel=true"], "mesh.tensor=1", {"tensor": 2}),
        (["loss_scale.growth_steps=7"], "the loss is not scaled", ["precision.policy=float16"]),
        (["remat.every=2"], "remat.policy=none", ["remat.policy=full"]),
        (["checkpoint.best_metric=eval_accuracy"], "checkpoint.keep_best=0", ["checkpoint.keep_best=1"]),
        (["model.max_positions=512"], "model.positions=rotary", ["model.positions=learned"]),
        (["model.qkv_biases=true", "model.biases=true"], "model.biases=True", ["model.biases=false"]),
        (["model.global_every=2"], "model.window=0", ["model.window=64"]),
        (["model.rope.local_base=50.0"], "model.window=0", ["model.window=64"]),
        (["model.rope.low=2.0"], "model.rope.factor=1.0", ["model.rope.factor=8"]),
        (
            ["optimizer.balance_rate=0.01", "model.moe.num_experts=4"],
            "model.moe.router=softmax",
            ["model.moe.router=sigmoid"],
        ),
        (
            ["optimizer.balance_rate=0.01", "model.moe.router=softmax"],
            "model.moe.num_experts=0",
            ["model.moe.num_experts=4", "model.moe.router=sigmoid"],
        ),
        (["data.text_field=body"], "data.source=python", ["data.source=text", "data.path=x.jsonl"]),
        (["data.packing=first_fit", "data.source=synthetic"], "data.source=synthetic", ["data.source=python"]),
        (["optimizer.momentum=0.9"], "optimizer.name=adamw", ["optimizer.name=sgd"]),
        (["optimizer.moment_block=64"], "optimizer.moments=float32", ["optimizer.moments=8bit"]),
        (["optimizer.moments=8bit", "optimizer.name=adafactor"], "optimizer.name=adafactor", ["optimizer.name=lion"]),
        (
            ["learning_rate.peak=1.0", "learning_rate.name=noam"],
            "learning_rate.name=noam",
            ["learning_rate.name=linear"],
        ),
        (
            ["learning_rate.base_batch_size=8"],
            "learning_rate.batch_scaling=none",
            ["learning_rate.batch_scaling=sqrt"],
        ),
    ],
)
def test_options_without_effect_are_listed_with_the_reason_and_stay_legal(overrides, why, shape):
    """Each with what puts it to use: a mesh, or another option."""
    assert without_effect(*overrides) == {overrides[0].partition("=")[0]: why}
    in_use = without_effect(*overrides, **shape) if isinstance(shape, dict) else without_effect(*overrides, *shape)
    assert in_use == {}


def test_compressed_gradients_have_no_other_dtype_on_the_wire():
    assert without_effect("reduction.name=int8", "precision.reduce_dtype=bfloat16", "reduction.kept=9", data=2) == {
        "reduction.kept": "reduction.name=int8",
        "precision.reduce_dtype": "reduction.name=int8",
    }


def test_a_source_of_ones_own_may_read_anything():
    own = ["data.source=tests.own.test_own_images:images", "data.path=a.h5", "data.tokenizer=t.json"]
    assert without_effect(*own, "data.text_field=body", "model.vocab_size=9") == {}


def routed():
    """A task of one's own, whose options are called as the decoder's are."""


routed.options = DecoderOptions


def test_a_task_of_ones_own_may_have_routers():
    config = resolve(default(), {"optimizer.balance_rate": "0.01"}, make_task=routed, reads_data=False)
    assert unused_options.without_effect(config, dict.fromkeys(AXES, 1)) == {}


def test_what_options_name_as_the_condition_of_their_use_is_there(monkeypatch):
    """A misspelled condition would always hold."""
    asked = []
    monkeypatch.setattr(unused_options, "unused", lambda options, path, known: asked.append(known) or {})
    unused_options.without_effect(Config(), dict.fromkeys(AXES, 1))

    def conditions(options, *around):
        for field in dataclasses.fields(options):
            inner = getattr(options, field.name)
            yield from ((name, options, *around) for name in field.metadata.get("only_for") or {})
            yield from conditions(inner, options, *around) if dataclasses.is_dataclass(inner) else ()

    def is_inside(name, options):
        """Whether a group has a field, or a group in it has the field of a dotted name."""
        return hasattr(options, name) or name in flags.flatten(options)

    found = [
        name for name, *groups, _ in conditions(Config()) if not any(is_inside(name, options) for options in groups)
    ]
    assert len(found) > 10
    assert set(found) <= asked[0].keys()


def test_the_table_shows_what_was_set_and_why_it_does_nothing():
    sizes = dict.fromkeys(AXES, 1)
    shown = unused_options.text(resolve(default(), {"pipeline.num_microbatches": "16"}), sizes)
    assert [line.split() for line in shown.splitlines()[2:]] == [["pipeline.num_microbatches", "16", "mesh.pipeline=1"]]
    assert unused_options.text(resolve(default()), sizes) == ""


def changed(options):
    """Yields the name of each number among the options, and the options with another one in its place."""
    for field in dataclasses.fields(options):
        if isinstance(field.default, (int, float)):
            value = field.default
            half = value // 2 if type(value) is int else value / 2
            yield field.name, dataclasses.replace(options, **{field.name: value + 3 if value == 0 else half})


@pytest.mark.parametrize("name", RATES)
def test_what_is_said_of_learning_rates_is_true(name):
    """A field counts as idle exactly where no learning rate of the run depends on it."""

    def rates(options):
        rate = learning_rate(options, num_steps=40, embed_dim=64, batch_size=8)
        return np.asarray(rate(np.arange(40)))

    options = LearningRateOptions(name=name, warmup_steps=4, batch_scaling="sqrt", base_batch_size=2)
    for field, other in changed(options):
        other = dataclasses.replace(other, decay_steps=30) if field == "decay_steps" else other
        other = dataclasses.replace(other, base_batch_size=4) if field == "base_batch_size" else other
        other = dataclasses.replace(other, warmup_steps=8) if field == "warmup_steps" else other
        is_idle = f"learning_rate.{field}" in unused(other, "learning_rate")
        assert is_idle == np.array_equal(rates(other), rates(options)), field


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_what_is_said_of_optimizers_is_true(name):
    """A number that the traced update does not hold changes nothing; nothing is compiled to see it."""
    axes = {"w": ("embed", "mlp"), "norm": ("norm",)}
    shapes = {"w": (4, 8), "norm": (4,)}
    params = {name: jax.ShapeDtypeStruct(shape, np.float32) for name, shape in shapes.items()}

    def program(options):
        made = optimizer(options, lambda count: 0.1, axes)
        state = jax.eval_shape(made.init, params)
        traced = jax.make_jaxpr(made.update)(params, state, params)
        return str(traced), [float(const) for const in traced.consts if np.ndim(const) == 0]

    options = OptimizerOptions(name=name)
    for field, other in changed(options):
        if field in ("clip_norm", "average", "balance_rate"):  # read by the step, and by the decoder
            continue
        is_idle = f"optimizer.{field}" in unused(other, "optimizer")
        assert is_idle == (program(other) == program(options)), field
