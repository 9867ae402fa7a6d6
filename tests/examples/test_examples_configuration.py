"""What configurations of these tasks and sources say of themselves, and what the core refuses for them."""

import pathlib

import pytest

from meshtrain.config import data_sources, unused_options
from meshtrain.config.build import default
from meshtrain.config.resolve import parse, resolve, to_json
from meshtrain.config.resume import from_json
from meshtrain.data.sources import DataOptions
from meshtrain.errors import UserError
from meshtrain.examples.numbers import NumberOptions
from meshtrain.examples.seq2seq import Seq2SeqOptions
from meshtrain.examples.seq2seq_task import seq2seq
from meshtrain.models.transformer.decoder import DecoderOptions
from meshtrain.sharding.rules import AXES
from tests.models.test_models_lora import SIZES, B, T, assert_like_merged

LLAMA = pathlib.Path(__file__).parents[1] / "hf" / "fixtures" / "llama"
NUMBERS = {"task": "seq2seq", "data.source": "numbers"}


@pytest.mark.parametrize(
    ("overrides", "why"),
    [
        ("remat.policy=full", "task=convnet"),
        ("layout.sequence_parallel=true", "task=convnet"),
        ("data.validation_fraction=0.3", "data.validation_path"),
        ("data.packing=first_fit", "data.source=idx"),
    ],
)
def test_what_images_do_not_read_is_listed(overrides, why):
    own = ["data.source=idx", "data.path=a-images", "data.validation_path=b-images"]
    texts = dict(one.split("=", 1) for one in (overrides, *own))
    config = resolve(default("convnet"), texts, reads_data=False)
    found = unused_options.without_effect(config, dict.fromkeys(AXES, 1) | {"tensor": 2})
    assert found == {overrides.partition("=")[0]: why}


def test_without_a_file_the_task_alone_decides_about_its_defaults():
    config, _ = parse(["--config.task=seq2seq", "--config.data.source=numbers"])
    assert config.model == Seq2SeqOptions(vocab_size=21)
    assert config.model.dropout_rate != DecoderOptions.dropout_rate


def test_adapters_of_an_encoder_decoder_are_those_of_the_merged_weights():
    options = Seq2SeqOptions(**SIZES, num_encoder_layers=1, dropout_rate=0.0)
    assert_like_merged(seq2seq(options, batch_size=B, sequence_length=T))


def test_a_source_has_its_own_options_and_those_of_all():
    config = resolve({}, NUMBERS | {"data.spelling": "english"})
    assert config.data == NumberOptions(source="numbers", spelling="english")
    assert from_json(to_json(config)) == config
    assert type(resolve({}).data) is DataOptions
    assert data_sources.options_of("mine:make_data") is DataOptions


def test_options_of_another_source_stay_legal_and_are_listed():
    config = resolve({}, {"data.spelling": "english", "data.text_field": "body"})
    assert (config.data.source, config.data.spelling, config.data.numbers_below) == ("python", "english", 1000)
    assert resolve(config) == config
    assert unused_options.without_effect(config, dict.fromkeys(AXES, 1)) == {
        "data.text_field": "data.source=python",
        "data.spelling": "data.source=python",
    }
    with pytest.raises(UserError) as caught:
        resolve({"data": {"numbers_blow": 5, "spelling": "german"}}, {"data.num_held_out": "-1"})
    unknown, *others = caught.value.problems
    assert unknown.startswith("data.numbers_blow: unknown key; allowed: data.source, ")
    assert unknown.endswith("; did you mean 'data.numbers_below'?")
    assert others == [
        "data.num_held_out: got -1; allowed: at least 0; nearest: 0",
        "data.spelling: got 'german'; allowed: digits, english; nearest: 'digits', the default",
    ]
