"""What a run starts from, and what it says before it goes on."""

import dataclasses
import json
import threading
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.linen import kw_only_dataclasses

from meshtrain.checkpoint.checkpoint import CHECKPOINTS, Checkpoints
from meshtrain.checkpoint.retention import CheckpointOptions
from meshtrain.config.resolve import to_json
from meshtrain.config.schema import Config
from meshtrain.optim.learning_rate import LearningRateOptions
from meshtrain.run import initial_state, workdir
from meshtrain.step.extension import PLAIN
from meshtrain.step.state import init_state

COSINE = Config(num_steps=40, learning_rate=LearningRateOptions(peak=3e-3, warmup_steps=10))


def said(run, before, now, capsys, step=40, skipped=0, more=None):
    (run / "config.json").write_text(json.dumps(json.loads(to_json(before)) | (more or {})))
    assembly = types.SimpleNamespace(config=now, task=types.SimpleNamespace(width=0))
    state = types.SimpleNamespace(step=step, skipped=types.SimpleNamespace(total=skipped))
    workdir.warn_of_another_rate(assembly, run, state)
    return capsys.readouterr().err.splitlines()


def test_a_task_that_cannot_be_found_by_name_has_a_rate_too(tmp_path, capsys):
    """As that of a notebook, or one without options: `train` is given the function itself."""
    [line] = said(tmp_path, dataclasses.replace(COSINE, task="nowhere:task", model={}), longer(80), capsys)
    assert "its decay was to end at step 40 and now ends at 80" in line


def test_an_option_of_a_former_version_does_not_hide_the_rate(tmp_path, capsys):
    """It may change between two starts; `workdir.check` has said so if not."""
    [line] = said(tmp_path, COSINE, longer(80), capsys, more={"pipeline": {"gone": "x"}})
    assert "its decay was to end at step 40 and now ends at 80" in line


def longer(num_steps, decay_steps=0):
    rate = dataclasses.replace(COSINE.learning_rate, decay_steps=decay_steps)
    return dataclasses.replace(COSINE, num_steps=num_steps, learning_rate=rate)


def test_a_learning_rate_that_rises_again_is_said_with_both_numbers(tmp_path, capsys):
    [line] = said(tmp_path, COSINE, longer(80), capsys)
    assert line == (
        "meshtrain: WARNING: learning rate: 0.000307 at step 40, 0.00195 at step 41: its decay was to end at step "
        "40 and now ends at 80; --config.learning_rate.decay_steps=40 restores the former rate"
    )
    [line] = said(tmp_path, COSINE, longer(80), capsys, step=42, skipped=2)
    assert "0.000307 at step 42, 0.00195 at step 43" in line, "skipped steps are no updates"


@pytest.mark.parametrize(
    ("now", "step"), [(longer(80, decay_steps=40), 40), (longer(40), 20), (longer(80), 80), (longer(80), 5)]
)
def test_a_learning_rate_that_goes_on_as_it_was_is_no_news(tmp_path, capsys, now, step):
    assert said(tmp_path, COSINE, now, capsys, step=step) == []


def test_a_run_begins_with_the_weights_that_it_names_and_a_state_of_its_own(tmp_path):
    with Checkpoints(tmp_path / CHECKPOINTS, CheckpointOptions()) as checkpoints:
        checkpoints.save(3, {"params": {"w": jnp.full(4, 7.0)}, "step": jnp.int32(3)}, {})
    own = init_state({"w": jnp.ones(4)}, optax.sgd(0.1), jax.random.key(0))
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    abstract = types.SimpleNamespace(params={"w": jax.ShapeDtypeStruct((4,), jnp.float32, sharding=here)})
    assembly = types.SimpleNamespace(
        config=Config(init_from=str(tmp_path)),
        states=types.SimpleNamespace(kept=abstract),
        state=abstract,
        extension=PLAIN,
        placed=types.SimpleNamespace(stack=None),
        task=types.SimpleNamespace(begin=None),
        steps=types.SimpleNamespace(init=lambda key_data: own),
    )
    begun = initial_state.initial_state(assembly)
    np.testing.assert_array_equal(begun.params["w"], np.full(4, 7.0))
    assert begun == dataclasses.replace(own, params=begun.params)
    assembly.config = Config()
    assert initial_state.initial_state(assembly) is own


def test_one_thread_traces_modules(run, tmp_path, monkeypatch):
    """While `nn.scan` makes a class, Flax takes fields out of its bases, which another thread would miss."""
    threads, make_class = set(), kw_only_dataclasses._process_class

    def noted(*given, **by_name):
        threads.add(threading.current_thread())
        return make_class(*given, **by_name)

    monkeypatch.setattr(kw_only_dataclasses, "_process_class", noted)
    run(tmp_path / "run", "num_steps=1", "remat.policy=full")
    assert threads == {threading.main_thread()}
