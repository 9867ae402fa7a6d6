"""config.json ties the embeddings, and the files have an output head: an equal one is a copy, another one is kept."""

import dataclasses
import json
import shutil

import jax
import numpy as np
import pytest

from meshtrain import hugging_face
from meshtrain.assembly.assemble import assemble
from meshtrain.config.from_hugging_face import of_folder
from meshtrain.config.schema import Config
from meshtrain.hf import adapters, export, folder, names, tensor_files
from meshtrain.hf.config_json import describe_model
from meshtrain.models.lora import LoraOptions
from meshtrain.run import base_weights, preflight, weights
from meshtrain.sharding.rules import AXES
from tests.hf.models import DATA, FIXTURES, NAMES, logits_of

ONE = dict.fromkeys(AXES, 1)
WARNING = "config.json has tie_word_embeddings=true, but {} differs from the embedding table; it is used as a separate"


def tied(name, target, *, equal=False, dtype=None):
    """Copies a fixture, ties it in config.json, and adds a head in a further file. Returns the head's name."""
    shutil.copytree(FIXTURES / name, target, dirs_exist_ok=True)
    stated = json.loads((target / "config.json").read_text())
    for half in [stated, *([stated["text_config"]] if "text_config" in stated else [])]:
        half["tie_word_embeddings"] = True
    (target / "config.json").write_text(json.dumps(stated))
    model = describe_model(target)
    stored, _ = tensor_files.tensors(target)
    table, head = names.table_and_head(model.family, model.options, stored)
    if head in stored and not equal:
        return head  # its own
    arrays = tensor_files.open_tensors({key: stored[key] for key in stored if key != head})
    values = np.array(arrays[table])
    dtype = dtype or {"BF16": "bfloat16", "F32": "float32"}[stored[table].dtype]
    values[-1, -1] += 0 if equal else 1
    rest = {key: np.array(array) for key, array in arrays.items()}
    for file in target.glob("*.safetensors*"):
        file.unlink()
    kinds = {"float32": "F32", "bfloat16": "BF16"}
    for own, kind in kinds.items():
        some = {key: array for key, array in rest.items() if stored[key].dtype == kind}
        if some:
            shapes = {key: array.shape for key, array in some.items()}
            export.write_file(target / f"{own}.safetensors", shapes, some.values(), own)
    export.write_file(target / "head.safetensors", {head: values.shape}, [values], dtype)
    return head


@pytest.mark.parametrize("name", [name for name in NAMES if name != "gpt-oss-mxfp4"])
def test_another_head_stays_and_an_equal_one_is_a_copy(name, tmp_path):
    """Of every family, with images beside it and in several files; in another dtype a head may be equal, too."""
    head = tied(name, tmp_path / "other")
    opened = folder.open_folder(tmp_path / "other")
    assert (opened.model.separate_head, opened.model.options.tied_embeddings) == (head, False)
    assert head in opened.stored
    assert "head/kernel" in {weight.path for weight in opened.table}
    for number, dtype in enumerate((None, "float32")):
        copied = tmp_path / str(number)
        assert tied(name, copied, equal=True, dtype=dtype) == head
        opened = folder.open_folder(copied)
        assert (opened.model.separate_head, opened.model.options.tied_embeddings) == ("", True)
        assert head not in opened.stored


def test_a_head_of_another_shape_is_a_line(tmp_path):
    head = tied("gpt2", tmp_path)
    export.write_file(tmp_path / "head.safetensors", {head: (3, 32)}, [np.zeros((3, 32))], "float32")
    with pytest.raises(folder.UserError, match=r"lm_head.weight: got shape \[3, 32\]; allowed: \["):
        folder.open_folder(tmp_path)


def test_logits_are_those_of_the_separate_head(tmp_path):
    tied("llama", tmp_path)
    got, expected = logits_of(tmp_path, ONE | {"fsdp": 4, "tensor": 2})
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", ["gpt2", "llama-bf16-sharded", "mistral3-images"])
def test_import_and_export_keep_every_tensor(name, tmp_path, capsys):
    head = tied(name, tmp_path / "came")
    hugging_face.main(["import", str(tmp_path / "came"), f"--to={tmp_path / 'run'}"])
    assert capsys.readouterr().err.count(WARNING.format(head)) == 1
    hugging_face.main(["export", f"--workdir={tmp_path / 'run'}", f"--to={tmp_path / 'out'}"])
    assert "WARNING" not in capsys.readouterr().err, "config.json and files of the export agree"
    stated = json.loads((tmp_path / "out" / "config.json").read_text())
    assert stated["tie_word_embeddings"] is False
    assert stated["model_type"] in ("llama", "gpt2", "mistral")
    before, after = folder.open_folder(tmp_path / "came"), folder.open_folder(tmp_path / "out")
    assert len(before.stored) == len(after.stored)
    pairs = [tensor_files.open_tensors(one.stored) for one in (before, after)]
    for key, tensor in pairs[1].items():
        [old] = [pairs[0][one] for one in (key, f"language_model.{key}") if one in pairs[0]]
        assert old.tobytes() == tensor.tobytes(), key


def test_a_run_and_adapters_on_such_a_folder_take_the_separate_head(tmp_path, capsys):
    base, peft = tmp_path / "base", tmp_path / "peft"
    head = tied("gpt2", base)
    peft.mkdir()
    stated = {"r": 2, "lora_alpha": 3, "base_model_name_or_path": str(base)}
    (peft / "adapter_config.json").write_text(json.dumps(stated))
    shapes = {"A": (2, 32), "B": (96, 2)}
    shapes = {
        f"base_model.model.transformer.h.{layer}.attn.c_attn.lora_{end}.weight": shapes[end]
        for layer in (0, 1)
        for end in "AB"
    }
    export.write_file(peft / adapters.WEIGHTS_FILE, shapes, map(np.ones, shapes.values()), "float32")
    given = {"model": of_folder(base).model, "batch_size": 2, "sequence_length": 24, "data": DATA}
    assembly = assemble(Config(init_from=str(base), **given), ONE, jax.devices())
    for init_from, beneath in ((base, ""), (peft, str(base))):
        config = Config(init_from=str(init_from), init_base=beneath, lora=LoraOptions(), **given)
        assert preflight.check(config, tmp_path / "run", 0) == []
        assert capsys.readouterr().err.count(WARNING.format(head)) == 1
        base_weights.refuse_other_weights(dataclasses.replace(assembly, config=config), tmp_path / "run")
    params, _ = weights.restore_params(base, None, assembly.states.kept.params)
    wanted = np.asarray(tensor_files.open_tensors(folder.open_folder(base).stored)[head])
    np.testing.assert_array_equal(np.asarray(params["head"]["kernel"])[:, : len(wanted)], wanted.T)
    tied_model = Config(**given | {"model": describe_model(FIXTURES / "gpt2").options})
    [line] = weights.weights_problems(tied_model, base)
    assert line.startswith("model.tied_embeddings: got True, but the model in ")


def test_the_printed_configuration_is_untied(tmp_path, capsys):
    head = tied("llama", tmp_path)
    hugging_face.main(["config", str(tmp_path)])
    printed = capsys.readouterr()
    assert WARNING.format(head) in printed.err
    assert "tied_embeddings" not in printed.out  # False is the default
