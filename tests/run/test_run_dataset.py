"""The data of a run follow what the task states: its vocabulary and its batch."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from meshtrain.config.resolve import resolve
from meshtrain.data.dataset import Dataset
from meshtrain.errors import UserError
from meshtrain.models.task import Entry, Task, token_batch
from meshtrain.run.dataset import open_data

SYNTHETIC = resolve({"data": {"source": "synthetic"}, "batch_size": 4, "sequence_length": 8})


def task(**states):
    return Task(init=dict, loss=len, batch=token_batch(4, 8), **states)


def test_synthetic_data_have_the_vocabulary_of_the_task():
    assert SYNTHETIC.model.vocab_size == 257
    assert open_data(SYNTHETIC, task(vocab_size=50)).train.vocab_size == 50
    with pytest.raises(UserError, match=r"data\.source: got synthetic, but this task has no vocabulary"):
        open_data(SYNTHETIC, task())


def test_text_is_measured_by_the_vocabulary_of_the_task(tmp_path):
    path = tmp_path / "words.txt"
    path.write_text("a few words of text " * 50)
    config = resolve({"data": {"source": "text", "path": str(path)}, "batch_size": 4, "sequence_length": 8})
    with pytest.raises(UserError, match=r"got 100; allowed for tokenizer 'bytes' .* at least 257"):
        open_data(config, task(vocab_size=100))
    assert open_data(config, task(vocab_size=300)).text.vocab_size == 257
    assert open_data(config, task()).text.vocab_size == 257, "nothing is refused where the task states nothing"


def test_a_task_may_read_some_of_the_entries_and_no_others():
    some = {name: token_batch(4, 8)[name] for name in ("tokens", "targets")}
    assert len(open_data(SYNTHETIC, dataclasses.replace(task(vocab_size=9), batch=some)).train)
    longer = {**some, "tokens": Entry((4, 9), jnp.int32, ("batch", "sequence"))}
    with pytest.raises(
        UserError, match=r"data\.source=synthetic, an example: got \[8\] int32 for 'tokens'; allowed: \[9\]"
    ):
        open_data(SYNTHETIC, dataclasses.replace(task(vocab_size=9), batch=longer))


def test_token_ids_of_own_data_are_below_the_vocabulary_of_the_task():
    example = {name: np.zeros(entry.shape[1:], entry.dtype) for name, entry in token_batch(4, 8).items()}
    data = Dataset([{**example, "targets": np.full(8, 50, np.int32)}], (), "ids")
    with pytest.raises(UserError, match=r"data\.train\[0\]: got 50 in 'targets'; allowed: 0 to 49, .*; nearest: 49"):
        open_data(SYNTHETIC, task(vocab_size=50), lambda config: data)
    assert open_data(SYNTHETIC, task(vocab_size=51), lambda config: data)
