"""`model.vocab_size=0`: as many tokens as the data's tokenizer has; a number that is given stays."""

import dataclasses
import json
import pathlib

import jax
import pytest
import tokenizers

from meshtrain.assembly.assemble import assemble
from meshtrain.config.build import default
from meshtrain.config.mesh_checks import check
from meshtrain.config.resolve import resolve, to_json
from meshtrain.config.resume import from_json
from meshtrain.data.prepare import prepare
from meshtrain.errors import UserError
from meshtrain.sharding.rules import AXES

pytestmark = pytest.mark.quick

NOT_KNOWN = (
    r"model.vocab_size: got 0 .* unknown on this machine \(data.path: got '/cluster/\*.bin'.*\); allowed: a number, or "
)


@pytest.fixture
def files(tmp_path: pathlib.Path) -> pathlib.Path:
    """A folder with a text, a tokenizer of 5 words and an end of documents, and the text as tokens."""
    vocabulary = {"</s>": 0, "the": 1, "cat": 2, "sat": 3, "on": 4, "mat": 5}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="</s>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "a.txt").write_text("the cat sat on the mat " * 50)
    prepare(str(tmp_path / "a.txt"), str(tmp_path / "a.bin"), tokenizer=str(tmp_path / "tokenizer.json"))
    return tmp_path


def vocabulary(folder, *overrides, **arguments):
    texts = dict(one.replace("DIR", str(folder)).split("=", 1) for one in overrides)
    return resolve(default(), texts, **arguments).model.vocab_size


TOKENIZER = ("data.source=text", "data.path=DIR/a.txt", "data.tokenizer=DIR/tokenizer.json")
TOKENS = ("data.source=tokens", "data.path=DIR/a.bin")


def test_it_is_that_of_the_data_where_none_is_given(files):
    assert vocabulary(files) == 257, "bytes, and the end of a document"
    assert vocabulary(files, *TOKENIZER) == 6
    assert vocabulary(files, *TOKENS) == 6
    assert vocabulary(files, "data.source=synthetic") == 257
    assert vocabulary(files, *TOKENS, "model.vocab_size=100") == 100
    # A plan does not read data, but uses what is there; and a tokenizer is there without its text.
    assert vocabulary(files, *TOKENS, reads_data=False) == 6
    assert vocabulary(files, "data.source=text", "data.path=nowhere.txt", reads_data=False) == 257


def test_where_the_data_are_not_here_it_has_to_be_given(files):
    tokens = ("data.source=tokens", "data.path=/cluster/*.bin")
    with pytest.raises(UserError, match=NOT_KNOWN) as caught:
        vocabulary(files, *tokens, reads_data=False)
    assert len(caught.value.problems) == 1
    assert vocabulary(files, *tokens, "model.vocab_size=50257", reads_data=False) == 50257
    with pytest.raises(UserError, match=r"^data.path: .*matches nothing") as caught:
        vocabulary(files, *tokens)
    assert len(caught.value.problems) == 1, "a run says once that its data are missing"
    (files / "tokenizer.json").write_text("{}")
    with pytest.raises(UserError, match=r"^data.tokenizer: .* not a valid tokenizer.json") as caught:
        vocabulary(files, *TOKENIZER)
    assert len(caught.value.problems) == 1


def test_padding_and_the_mesh_follow_it_and_config_json_holds_the_number(files):
    texts = dict(one.replace("DIR", str(files)).split("=", 1) for one in TOKENS)
    config = resolve(default(), texts | {"model.vocab_multiple": "4", "batch_size": "8"})
    assert config.model.padded_vocab_size == 8
    assert json.loads(to_json(config))["model"]["vocab_size"] == 6
    assert resolve(from_json(to_json(config))) == config, "a resumed run has the same"
    shape = dict.fromkeys(AXES, 1) | {"tensor": 2}
    assert assemble(config, shape, jax.devices()[:2]).state.params["embedding"]["table"].shape[0] == 8
    odd = dataclasses.replace(config.model, vocab_multiple=3)
    assert check(dataclasses.replace(config, model=odd), shape) == []
    assert "model.vocab_multiple" in check(dataclasses.replace(config, model=odd), shape | {"tensor": 4})[0]
