"""A Hugging Face folder stands where a workdir may: in `init_from`, as the workdir of commands, in `hf import`."""

import dataclasses
import json
import shutil
import types

import jax
import numpy as np
import pytest

from meshtrain import evaluate, generate, hugging_face
from meshtrain.assembly.assemble import assemble
from meshtrain.cli.flags import load
from meshtrain.config.from_hugging_face import of_folder
from meshtrain.config.resolve import resolve
from meshtrain.config.schema import Config
from meshtrain.data.chat_template import open_template
from meshtrain.data.sources import DataOptions
from meshtrain.errors import UserError
from meshtrain.hf import folder
from meshtrain.hf.config_json import describe_model
from meshtrain.hf.export import byte_tokenizer
from meshtrain.optim.learning_rate import LearningRateOptions
from meshtrain.run import base_weights, initial_state, preflight, weights
from meshtrain.sharding.rules import AXES
from tests.hf.models import FIXTURES, NAMES

LLAMA = FIXTURES / "llama-bf16-sharded"
ONE = dict.fromkeys(AXES, 1)


@pytest.fixture(scope="module")
def assembly():
    config = Config(model=describe_model(LLAMA).options, batch_size=2, sequence_length=24, init_from=str(LLAMA))
    return assemble(config, ONE, jax.devices())


@pytest.fixture(scope="module")
def params(assembly):
    return folder.read(folder.open_folder(LLAMA), assembly.state.params)


def assert_equal(got, want):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))


def test_a_run_begins_with_the_weights_of_a_folder(assembly, params):
    own = dataclasses.replace(assembly.states.kept, params=None, step=jax.numpy.int32(0))
    there = types.SimpleNamespace(
        config=assembly.config,
        states=assembly.states,
        state=assembly.state,
        placed=assembly.placed,
        extension=assembly.extension,
        task=assembly.task,
        steps=types.SimpleNamespace(init=lambda key_data: own),
    )
    base_weights.refuse_other_weights(there, FIXTURES / "nowhere")
    assert_equal(initial_state.initial_state(there).params, params)


def test_options_that_no_shape_shows_are_compared(tmp_path):
    config = Config(model=describe_model(LLAMA).options, init_from=str(LLAMA), sequence_length=24)
    assert preflight.check(config, tmp_path, 0) == []
    other = dataclasses.replace(
        config,
        model=dataclasses.replace(
            config.model,
            rope=dataclasses.replace(config.model.rope, base=5e5),
            norm=dataclasses.replace(config.model.norm, epsilon=1e-6),
        ),
    )
    lines = preflight.check(other, tmp_path, 0)
    assert [line.partition(": got")[0] for line in lines] == [
        "init_from: model.rope.base",
        "init_from: model.norm.epsilon",
    ]
    assert preflight.check(other, tmp_path, 1) == [] or "init_from" not in str(preflight.check(other, tmp_path, 1))


def test_texts_longer_than_those_of_training_are_said(capsys):
    config = Config(model=describe_model(LLAMA).options, sequence_length=65)
    assert weights.weights_problems(config, LLAMA) == []
    assert "WARNING: sequence_length: got 65; the model in" in capsys.readouterr().err


def test_a_printed_configuration_has_the_model_of_the_folder(tmp_path, capsys):
    assert hugging_face.main(["config", str(LLAMA)]) == 0
    (tmp_path / "mine.py").write_text(capsys.readouterr().out)
    config = resolve(load(str(tmp_path / "mine.py"), []), reads_data=False)
    assert config.model == describe_model(LLAMA).options
    assert config.init_from == str(LLAMA)
    assert (config.sequence_length, config.precision.policy) == (64, "bfloat16")
    assert config.learning_rate.warmup_steps == config.num_steps // 10
    assert "config.num_steps = 300\n" in (tmp_path / "mine.py").read_text()
    assert "config.mesh.tensor = 1" in (tmp_path / "mine.py").read_text()


@pytest.mark.parametrize("name", NAMES)
def test_the_printed_configuration_of_each_family_fine_tunes_as_it_is(name, tmp_path, capsys):
    """All but the step: the file's checks, the weights of the folder, and rates that fit the number of steps."""
    assert hugging_face.main(["config", str(FIXTURES / name), "--config.lora.rank=2"]) == 0
    (tmp_path / "mine.py").write_text(capsys.readouterr().out)
    config = resolve(load(str(tmp_path / "mine.py"), []))
    assert preflight.check(config, tmp_path / "run", 0) == []
    base_weights.refuse_other_weights(assemble(config, ONE, jax.devices()[:1]), tmp_path / "run")
    assert config.learning_rate.peak == pytest.approx(1.0 / config.model.embed_dim, rel=0.05)
    assert config.learning_rate.warmup_steps == config.num_steps // 10


@pytest.mark.parametrize("num_lines, rank, wanted", [(60, 8, (8, 100, 10)), (4000, 0, (64, 179, 17))])
def test_a_printed_configuration_fits_the_number_of_examples(num_lines, rank, wanted, with_text, tmp_path, capsys):
    lines = [json.dumps({"prompt": f"{n} is ", "completion": "the mesh " * 6}) for n in range(num_lines)]
    (tmp_path / "lines.jsonl").write_text("\n".join(lines))
    words = [
        "--config.data.source=chat",
        f"--config.data.path={tmp_path / 'lines.jsonl'}",
        f"--config.lora.rank={rank}",
    ]
    words += ["--config.data.tokenizer=bytes", "--config.model.vocab_size=257", "--config.sequence_length=64"]
    assert hugging_face.main(["config", str(with_text), *words]) == 0
    (tmp_path / "mine.py").write_text(capsys.readouterr().out)
    config = resolve(load(str(tmp_path / "mine.py"), []))
    assert (config.batch_size, config.num_steps, config.learning_rate.warmup_steps) == wanted
    assert config.learning_rate.peak == pytest.approx((1.0 if rank else 0.1) / config.model.embed_dim, rel=0.05)
    assert (config.data.source, config.lora.rank, config.model.vocab_size) == ("chat", rank, 257)
    assert hugging_face.main(["config", str(with_text), *words, "--config.num_steps=7", "--config.batch_size=2"]) == 0
    printed = capsys.readouterr().out
    assert "config.num_steps = 7\n" in printed
    assert "config.batch_size = 2\n" in printed


def test_a_wrong_field_of_a_printed_configuration_is_one_line(with_text):
    with pytest.raises(UserError) as error:
        hugging_face.main(["config", str(with_text), "--config.data.source=chat", "--config.lora.rnak=8"])
    assert [line.partition(":")[0] for line in error.value.problems] == ["lora.rnak", "data.path"]


def test_a_folder_brings_its_tokenizer_and_its_chat_template(tmp_path):
    for path in (LLAMA / "config.json", *(FIXTURES / "chat").iterdir()):
        shutil.copy(path, tmp_path)
    data = of_folder(tmp_path).data
    assert data.tokenizer == str(tmp_path)
    template = open_template(data.tokenizer, data.chat_template)
    assert template.name == str(tmp_path / "chat_template.jinja")


@pytest.fixture
def with_text(tmp_path):
    """A folder with a tokenizer of 310 tokens in a model of 119: nothing here reads a text."""
    copied = shutil.copytree(LLAMA, tmp_path / "model")
    for path in (FIXTURES / "chat").iterdir():
        shutil.copy(path, copied)
    return copied


def test_text_is_read_with_the_tokenizer_of_the_model(with_text, tmp_path):
    def lines(**changes):
        named = {name: changes.pop(name) for name in ("init_ignore",) if name in changes}
        config = Config(model=describe_model(LLAMA).options, init_from=str(with_text), sequence_length=24, **named)
        return preflight.check(dataclasses.replace(config, data=DataOptions(**changes)), tmp_path / "run", 0)

    [line] = lines()
    assert line.startswith(
        f"init_from: data.tokenizer: got 'bytes', but the model was trained with the tokens of {with_text}"
    )
    assert line.endswith(f"; nearest: --config.data.tokenizer={with_text}")
    assert lines(tokenizer=str(with_text)) == lines(tokenizer=f"{with_text}/tokenizer.json") == []
    assert lines(init_ignore="tokenizer.json") == [], "another one is named"
    assert lines(source="synthetic") == [], "no text is read"
    content = json.loads((with_text / "tokenizer.json").read_text())
    other = tmp_path / "other.json"
    other.write_text(json.dumps(content | {"added_tokens": []}))
    assert lines(tokenizer=str(other)) == [], "tokens may be added"
    content["model"]["vocab"] |= {"new": 310}
    other.write_text(json.dumps(content))
    assert [line.partition(", but")[0] for line in lines(tokenizer=str(other))] == [
        f"init_from: data.tokenizer: got '{other}'"
    ]


def test_an_exported_tokenizer_of_bytes_is_that_of_bytes(with_text, tmp_path):
    (with_text / "tokenizer.json").write_text(byte_tokenizer())
    config = Config(model=describe_model(LLAMA).options, init_from=str(with_text), sequence_length=24)
    assert preflight.check(config, tmp_path / "run", 0) == []


@pytest.mark.parametrize("has_tokenizer, own_end", [(True, 2), (False, -1)])
def test_a_text_ends_with_each_id_that_the_folder_names(has_tokenizer, own_end, with_text, monkeypatch):
    (with_text / "generation_config.json").write_text('{"eos_token_id": [1, 75]}')
    if not has_tokenizer:
        (with_text / "tokenizer.json").unlink()
    ends = []
    monkeypatch.setattr(generate, "restore_weights", lambda *given: ({}, 0))
    monkeypatch.setattr(generate, "generator", lambda assembly, params, end_ids: ends.extend(end_ids))
    monkeypatch.setattr(generate, "answers", lambda *given: [])
    assert generate.main([f"--workdir={with_text}", "--prompt=1", "--num-tokens=1"]) == 0
    assert {*ends} == {own_end, 1, 75}


@pytest.mark.parametrize("name", ["constant", "cosine", "noam", "inverse_sqrt"])
def test_a_run_that_ends_in_its_warm_up_is_warned_of(name, tmp_path, capsys):
    config = Config(num_steps=30, learning_rate=LearningRateOptions(name=name))
    assert preflight.check(config, tmp_path, 0) == []
    assert capsys.readouterr().err == (
        "meshtrain: WARNING: learning_rate.warmup_steps: got 100, but num_steps = 30 end before the peak; nearest: "
        "--config.learning_rate.warmup_steps=3\n"
    )
    preflight.check(dataclasses.replace(config, num_steps=100), tmp_path, 0)
    assert capsys.readouterr().err == "", "the last step has the peak"


def test_an_imported_folder_is_a_workdir_with_the_same_weights(assembly, params, tmp_path, capsys):
    assert hugging_face.main(["import", str(LLAMA), f"--to={tmp_path / 'run'}"]) == 0
    assert capsys.readouterr().out.startswith(f"{assembly.task.num_parameters:,} parameters in ")
    got, step = weights.restore_params(tmp_path / "run", None, assembly.states.kept.params)
    assert step == 0
    assert_equal(got, params)
    assert (tmp_path / "run" / "config.json").is_file()
    lines = preflight.check(dataclasses.replace(assembly.config, init_from=""), tmp_path / "run", 0)
    assert any(f"nearest: --config.init_from={tmp_path / 'run'} with another --workdir" in line for line in lines)
    with pytest.raises(UserError, match="which is not empty; allowed: a new folder"):
        hugging_face.main(["import", str(LLAMA), f"--to={tmp_path / 'run'}"])


def test_an_ignored_key_is_written_into_configuration_workdir_and_export(tmp_path, capsys):
    strange = shutil.copytree(LLAMA, tmp_path / "strange")
    values = json.loads((LLAMA / "config.json").read_text()) | {"my_tool": 1}
    (strange / "config.json").write_text(json.dumps(values))
    for words in (["config", str(strange)], ["import", str(strange), f"--to={tmp_path / 'run'}"]):
        with pytest.raises(UserError, match=r"my_tool: got 1; .*; nearest: --config.init_ignore=my_tool$"):
            hugging_face.main(words)
    hugging_face.main(["config", str(strange), "--ignore=my_tool"])
    (tmp_path / "mine.py").write_text(capsys.readouterr().out)
    config = resolve(load(str(tmp_path / "mine.py"), []), reads_data=False)
    assert (config.init_ignore, weights.weights_problems(config, strange)) == ("my_tool", [])
    hugging_face.main(["import", str(strange), f"--to={tmp_path / 'run'}", "--config.init_ignore=my_tool"])
    assert json.loads((tmp_path / "run" / "config.json").read_text())["init_ignore"] == "my_tool"
    hugging_face.main(["export", f"--workdir={tmp_path / 'run'}", f"--to={tmp_path / 'out'}"])
    stated = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (stated["my_tool"], stated["meshtrain_ignored"]) == (1, ["my_tool"])
    with pytest.raises(UserError, match="my_tool: got 1; "):
        evaluate.main([f"--workdir={tmp_path / 'out'}"])


def test_wrong_words_are_refused_together(tmp_path):
    with pytest.raises(UserError) as error:
        hugging_face.main(["improt", str(tmp_path), "--tow=x"])
    starts = [
        "arguments: got '--tow",
        "hf: got 'improt'; allowed: config, import, export",
        f"{tmp_path}: got a folder without",
    ]
    assert [line[: len(begin)] for line, begin in zip(error.value.problems, starts, strict=True)] == starts
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    makes = f"`hf export --workdir={tmp_path / 'run'} --to=DIR` creates one"
    with pytest.raises(UserError, match=f"allowed: a Hugging Face folder; nearest: {makes}"):
        hugging_face.main(["config", str(tmp_path / "run")])
    for words, line in (
        (["import", str(LLAMA)], "--to: got nothing; allowed: a new folder; nearest: --to=runs/imported"),
        (["export"], "--to: got nothing; allowed: a new folder; nearest: --to=models/exported"),
        (["export", "W", "--to=new"], "hf export: got 'W'; allowed: --workdir=W --to=DIR; nearest: --workdir=W"),
        ([], "hf: got nothing; allowed: config, import, export; nearest: hf config DIR"),
    ):
        with pytest.raises(UserError) as error:
            hugging_face.main(words)
        assert error.value.problems == (line,)


def test_a_folder_has_no_steps():
    with pytest.raises(UserError, match="--step: got 3 with a Hugging Face folder, which has no steps"):
        generate.main([f"--workdir={LLAMA}", "--prompt=1 2", "--step=3"])


def test_a_folder_with_problems_is_refused_as_a_workdir(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(UserError) as error:
        evaluate.main([f"--workdir={tmp_path}"])
    of_config, of_file = error.value.problems
    assert of_config.startswith(f"{tmp_path / 'config.json'}: got nothing there; allowed: a file")
    assert of_file.startswith(f"{tmp_path / 'model.safetensors'}: not safetensors (")


def test_an_evaluation_without_data_says_what_was_scored(monkeypatch, capsys):
    scored = {"loss": 1.0}
    monkeypatch.setattr(evaluate, "restore_weights", lambda *given: ({}, 0))
    monkeypatch.setattr(evaluate, "evaluate_parts", lambda *given: (dict.fromkeys(given[2].parts, scored), scored))
    assert evaluate.main([f"--workdir={LLAMA}", "--json"]) == 0
    [part] = json.loads(capsys.readouterr().out)["files"]
    assert part == {"name": "validation of data.source=synthetic", "loss": 1.0}


@pytest.mark.slow
def test_a_folder_generates_and_is_evaluated_as_a_workdir(capsys):
    """Without a tokenizer.json text is numbers; the most probable token is that of the expected logits."""
    with np.load(LLAMA / "expected.npz") as file:
        ids, expected = file["input_ids"], file["logits"]
    words = [f"--workdir={LLAMA}", "--config.precision.policy=float32"]
    prompt = " ".join(map(str, ids[0]))
    assert generate.main([*words, f"--prompt={prompt}", "--num-tokens=1", "--temperature=0"]) == 0
    assert capsys.readouterr().out.split() == [*prompt.split(), str(expected[0, -1].argmax())]
    assert evaluate.main([*words, "--config.num_eval_batches=1"]) == 0
    said = capsys.readouterr().out
    assert said.startswith(f"{LLAMA} on one device")
    assert "loss" in said
    assert "\nvalidation of data.source=synthetic " in said
