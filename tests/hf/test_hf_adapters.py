"""Runs with adapters leave as a model or as a folder of the package peft, and both compute what the run computes."""

import dataclasses
import functools
import json
import shutil

import jax
import numpy as np
import pytest

from meshtrain import hugging_face, training
from meshtrain.assembly.assemble import assemble
from meshtrain.assembly.facts import kept_params
from meshtrain.config.from_hugging_face import of_folder
from meshtrain.data.sources import DataOptions
from meshtrain.errors import UserError
from meshtrain.examples.seq2seq import Seq2SeqOptions
from meshtrain.hf import adapters, export, folder, names, tensor_files
from meshtrain.models.lora import LoraOptions
from meshtrain.observe.trackers import ObserveOptions
from meshtrain.optim.learning_rate import LearningRateOptions
from meshtrain.run import base_weights, initial_state, preflight
from meshtrain.sharding.mesh import MeshOptions
from meshtrain.sharding.rules import AXES
from meshtrain.sharding.trainable import is_adapter
from meshtrain.sharding.trees import leaves_with_paths
from meshtrain.step.precision import PrecisionOptions
from tests.hf.models import FIXTURES, NAMES, computed, logits_of

LORA = LoraOptions(rank=3, alpha=4.5)
NUM_SUMMED = {"query": 1, "key": 1, "value": 1, "output": 2, "gate": 1, "up": 1, "down": 1}  # dims of a matrix
NUM_SUMMED |= dict.fromkeys(("query_down", "key_value_down", "key_value"), 1)
# An export has no tensors of images, and none in 4 bits.
TARGETS = {f"all of {name}": (name, set(NUM_SUMMED)) for name in NAMES if not name.endswith(("-images", "-mxfp4"))}
TARGETS["some of gpt2"] = TARGETS["rank-stabilized gpt2"] = ("gpt2", {"query", "value", "down"})
OF_EXPERTS = {
    "mixtral",
    "qwen3-moe",
    "gpt-oss",
    "deepseek-v3",
    "deepseek-v3-plain",
}  # of their matrices only those of attention are modules of peft
OF_ATTENTION = set(NUM_SUMMED) - {"gate", "up", "down"}
TARGETS |= {f"all of {name}": (name, OF_ATTENTION) for name in OF_EXPERTS}


def params_of(opened, targets):
    """The weights of a folder, with random adapters beside the matrices of these names."""
    generator, size, tree = np.random.default_rng(0), names.sizes(opened.model.options), {}
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    for weight in opened.table:
        *groups, name = weight.path.split("/")
        group = tree
        for one in groups:
            group = group.setdefault(one, {})
        shape = (*names.stack(weight, size), *(size[letter] for letter in weight.layout.split()))
        group[name] = jax.ShapeDtypeStruct(shape, np.float32, sharding=here)
    params = folder.read(opened, tree)
    stacks = [params[name] for name in ("first_layers", "layers") if name in params]
    parts = [(stack[part], part) for stack in stacks for part in sorted({"attention", "mlp", "experts"} & set(stack))]
    for group, part in parts:
        num_stacked = 2 if part == "experts" else 1
        for name in targets & set(group):
            stack, shape = group[name].shape[:num_stacked], group[name].shape[num_stacked:]
            inputs, outputs = shape[: NUM_SUMMED[name]], shape[NUM_SUMMED[name] :]
            group[f"{name}_lora_a"] = jax.numpy.asarray(generator.normal(size=(*stack, *inputs, 3)), np.float32)
            group[f"{name}_lora_b"] = jax.numpy.asarray(generator.normal(size=(*stack, 3, *outputs)), np.float32)
    return params


def read(directory):
    found, problems = tensor_files.tensors(directory)
    assert problems == []
    return {name: np.asarray(tensor, np.float32) for name, tensor in tensor_files.open_tensors(found).items()}


def scale_of(stated, module):
    """alpha / r of a module, or alpha / sqrt(r), as peft finds them: a pattern is a name's last parts."""
    [name] = [name for name in stated["target_modules"] if module.endswith(f".{name}")]
    ranks, alphas = stated["rank_pattern"], stated["alpha_pattern"]
    alpha, rank = (alphas[name], ranks[name]) if name in ranks else (stated["lora_alpha"], stated["r"])
    return alpha / (rank**0.5 if stated["use_rslora"] else rank), rank


@pytest.mark.parametrize("case", TARGETS)
def test_merged_matrices_are_the_base_plus_the_products_of_peft(case, tmp_path):
    """Both are written from one run, with different code; peft's formula joins them."""
    name, targets = TARGETS[case]
    lora = dataclasses.replace(LORA, rank_stabilized=case.startswith("rank-stabilized"))
    opened = folder.open_folder(FIXTURES / name)
    family, options, params = opened.model.family, opened.model.options, params_of(opened, targets)
    for one in ("merged", "peft"):
        (tmp_path / one).mkdir()
    export.write_weights(tmp_path / "merged", family, options, params, "float32", lora)
    num_bytes = adapters.write(tmp_path / "peft", family, options, lora, params, "float32", None)
    base, found, factors = (read(path) for path in (FIXTURES / name, tmp_path / "merged", tmp_path / "peft"))
    stated = json.loads((tmp_path / "peft" / "adapter_config.json").read_text())
    assert (stated["r"], stated["use_rslora"]) == (3, lora.rank_stabilized)
    assert num_bytes == sum(tensor.nbytes for tensor in factors.values())
    assert base.keys() == found.keys()
    changed = 0
    for key, weight in base.items():
        module = f"base_model.model.{key.removesuffix('.weight')}"
        if f"{module}.lora_A.weight" not in factors:
            np.testing.assert_array_equal(found[key], weight, err_msg=key)
            continue
        scale, rank = scale_of(stated, module)
        a, b = factors.pop(f"{module}.lora_A.weight"), factors.pop(f"{module}.lora_B.weight")
        assert len(a) == b.shape[1] == rank
        added = scale * (b @ a).T if stated["fan_in_fan_out"] else scale * (b @ a)
        assert np.linalg.norm(added) > np.linalg.norm(weight)
        np.testing.assert_allclose(found[key], weight + added, rtol=0, atol=1e-5 * np.abs(added).max(), err_msg=key)
        changed += 1
    assert not factors, "each factor belongs to a tensor of the model"
    assert changed == options.num_layers * len(stated["target_modules"])


@pytest.mark.parametrize("name", ["mixtral", "qwen3-moe"])
def test_each_expert_gets_its_own_product(name, tmp_path):
    opened = folder.open_folder(FIXTURES / name)
    params = params_of(opened, {"gate", "up", "down"})
    export.write_weights(tmp_path, opened.model.family, opened.model.options, params, "float32", LORA)
    base, found = read(FIXTURES / name), read(tmp_path)
    changed = {key for key in base if not np.array_equal(base[key], found[key])}
    assert len(changed) == 2 * 4 * 3
    rows = {weight.path.rpartition("/")[2]: weight for weight in opened.table if weight.stacks == "LE"}
    for part, row in rows.items():
        a, b = (np.asarray(params["layers"]["experts"][f"{part}_lora_{end}"]) for end in "ab")
        for layer, expert in np.ndindex(2, 4):
            key, added = row.name.format(layer, expert), LORA.alpha / 3 * (a[layer, expert] @ b[layer, expert]).T
            np.testing.assert_allclose(found[key], base[key] + added, rtol=0, atol=1e-5 * np.abs(added).max())


def test_names_are_those_of_peft(tmp_path):
    """As peft 0.21 writes them; scripts/bench hf_transformers reads both folders with it."""
    wanted = {
        "llama": (
            ["self_attn.q_proj", "self_attn.v_proj"],
            "base_model.model.model.layers.1.self_attn.v_proj.lora_B.weight",
            {},
            False,
        ),
        "gpt2": (
            ["attn.c_attn"],
            "base_model.model.transformer.h.1.attn.c_attn.lora_B.weight",
            {"attn.c_attn": 6},
            True,
        ),
    }
    for name, (modules, last, ranks, is_transposed) in wanted.items():
        opened, out = folder.open_folder(FIXTURES / name), tmp_path / name
        out.mkdir()
        params = params_of(opened, {"query", "value"})
        lora = LoraOptions(rank=3, alpha=6.0)
        adapters.write(out, opened.model.family, opened.model.options, lora, params, "bfloat16", "base")
        stated = json.loads((out / "adapter_config.json").read_text())
        assert stated["target_modules"] == modules
        assert (stated["r"], stated["lora_alpha"], stated["base_model_name_or_path"]) == (3, 6, "base")
        assert (stated["rank_pattern"], stated["fan_in_fan_out"]) == (ranks, is_transposed)
        found, _ = tensor_files.tensors(out)
        assert list(found)[-1] == last
        assert {one.dtype for one in found.values()} == {"BF16"}


@pytest.mark.parametrize("case", [*(f"all of {name}" for name in ("gpt2", "phi3", "llama")), "rank-stabilized gpt2"])
def test_what_is_written_is_read_bitwise(case, tmp_path):
    name, targets = TARGETS[case]
    lora = dataclasses.replace(LORA, rank_stabilized=case.startswith("rank-stabilized"))
    model = folder.open_folder(FIXTURES / name)
    params = dict(leaves_with_paths(params_of(model, targets)))
    adapters.write(tmp_path, model.model.family, model.model.options, lora, params_of(model, targets), "float32", "x")
    found = adapters.open_adapters(tmp_path)
    assert (found.options, found.base) == (lora, "x")
    own = {path: leaf for path, leaf in params.items() if is_adapter(path)}
    factors = adapters.factors(found, str(FIXTURES / name), model.model.options)[1]
    assert {f"{path}_lora_{end}" for path in factors for end in "ab"} == own.keys()
    got = adapters.read(factors, own)
    for path, leaf in own.items():
        np.testing.assert_array_equal(got[path], leaf, err_msg=path)


def foreign(directory, shapes, **stated):
    """Writes a folder as peft makes them, with random tensors. Returns name -> tensor."""
    directory.mkdir()
    made = {f"base_model.model.{name}.weight": np.random.default_rng(3).normal(size=shape).astype(np.float32)
            for name, shape in shapes.items()}  # fmt: skip
    export.write_file(directory / adapters.WEIGHTS_FILE, {key: one.shape for key, one in made.items()}, made.values(),
                      "float32")  # fmt: skip
    stated = {"r": 2, "lora_alpha": 3, "base_model_name_or_path": str(FIXTURES / "gpt2"), **stated}
    (directory / "adapter_config.json").write_text(json.dumps(stated))
    return list(made.values())


ATTENTION = "transformer.h.{}.attn.c_attn.lora_{}"
OF_GPT2 = {ATTENTION.format(layer, end): shape for layer in (0, 1) for end, shape in (("A", (2, 32)), ("B", (96, 2)))}


def test_one_pair_for_queries_keys_and_values_is_merged_into_each(tmp_path):
    """As peft itself adapts GPT-2: here the product is made by its formula."""
    pairs = foreign(tmp_path / "peft", OF_GPT2, use_rslora=True)
    named = {"init_from": str(tmp_path / "peft"), "init_base": str(FIXTURES / "gpt2")}  # not by peft's folder alone
    config = config_of("gpt2", **named, lora=LoraOptions(rank=0))
    assembly = assemble(config, dict.fromkeys(AXES, 1), jax.devices())
    assert preflight.check(config, tmp_path / "run", 0) == []
    base_weights.refuse_other_weights(assembly, tmp_path / "run")
    got, base = (
        initial_state.initial_state(assembly).params,
        folder.read(folder.open_folder(FIXTURES / "gpt2"), assembly.state.params),
    )
    for layer, (a, b) in enumerate((pairs[:2], pairs[2:])):
        added = (3 / 2**0.5 * b @ a).T.reshape(32, 3, -1)
        for place, name in enumerate(("query", "key", "value")):
            one, other = (np.asarray(some["layers"]["attention"][name][layer]).reshape(32, -1) for some in (got, base))
            np.testing.assert_allclose(one - other, added[:, place], rtol=0, atol=1e-5 * np.abs(added).max())
    np.testing.assert_array_equal(got["layers"]["mlp"]["up"], base["layers"]["mlp"]["up"])


GPT2 = str(FIXTURES / "gpt2")
WRONG = {
    "rank": ({}, {"init_base": GPT2, "lora": LoraOptions(rank=4, alpha=3.0, targets="query|key|value")},
             "got adapters that differ from the options in lora; allowed: equal options, or lora.rank=0, which merges "
             "them; nearest: "
             "--config.lora.rank=2"),
    "all": ({"use_rslora": True}, {"init_base": GPT2, "lora": LoraOptions(rank=2)}, "--config.lora.alpha=3.0 "
            "'--config.lora.targets="
            "^layers/attention/query$|^layers/attention/key$|^layers/attention/value$' "
            "--config.lora.rank_stabilized=True"),
    "base": ({"base_model_name_or_path": "openai/gpt2"}, {}, "got adapters of 'openai/gpt2', which is not a folder on "
             "this machine; allowed: the base model of the adapters, or a run with it; nearest: --config.init_base="),
    "no base": ({"base_model_name_or_path": None}, {}, "got adapters of '', which is not a folder"),
    "another base": ({}, {"init_base": str(FIXTURES / "llama")}, "model.mlp_dim: got 128, but the model in"),
    "scales": ({"alpha_pattern": {"c_attn": 9}}, {}, ("adapter_config.json: c_attn: got the scale 4.5 according to the "
               "patterns, but 1.5 according to r and "
        "lora_alpha; allowed: ")),
    "start": ({"init_lora_weights": "pissa"}, {}, "adapter_config.json: init_lora_weights: got 'pissa'; allowed: "),
    "kind": ({"r": None}, {}, "adapter_config.json: r: got nothing; allowed: int; nearest: "),
    "task": ({}, {"model": Seq2SeqOptions(), "task": "seq2seq"}, "got peft adapters with task=seq2seq"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_what_does_not_fit_is_one_line(case, tmp_path):
    stated, changes, said = WRONG[case]
    foreign(tmp_path / "peft", OF_GPT2, **stated)
    config = dataclasses.replace(config_of("gpt2", init_from=str(tmp_path / "peft")), **changes)
    lines = preflight.check(config, tmp_path / "run", 0)
    if not lines:
        with pytest.raises(UserError) as caught:
            base_weights.refuse_other_weights(assemble(config, dict.fromkeys(AXES, 1), jax.devices()), tmp_path / "run")
        lines = caught.value.problems
    assert len(lines) == 1 or case == "another base"
    assert lines[0].startswith("init_from: ")
    assert said in lines[0]


HOSTILE = (
    "0", "-1", "-0.0", "1e999", "-1e999", "NaN", "9" * 400, "1e-320", "1e308", "true", '"2"', '"\\ud800"', "[]", "[1]",
    '{"c_attn": 0}', '{"c_attn": 1e999}', '{"c_attn": "x"}',
)  # fmt: skip
LEGAL = {("use_rslora", "true"), ("init_lora_weights", "0"), ("init_lora_weights", "-0.0"),
         ("init_lora_weights", "true"), ("alora_invocation_tokens", "[]")}  # fmt: skip
KEYS = ("r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "base_model_name_or_path", "peft_type",
        "init_lora_weights", "alora_invocation_tokens")  # fmt: skip


@pytest.mark.parametrize("key", KEYS)
def test_a_value_of_another_kind_names_the_file_and_the_key(key, tmp_path):
    foreign(tmp_path / "peft", OF_GPT2)
    file = tmp_path / "peft" / "adapter_config.json"
    plain = json.loads(file.read_text())
    for text in HOSTILE:
        file.write_text(json.dumps(plain | {key: "HERE"}).replace('"HERE"', text))
        if (key, text) in LEGAL or (key == "base_model_name_or_path" and text == '"2"'):
            adapters.open_adapters(tmp_path / "peft")
            continue
        with pytest.raises(UserError) as caught:
            adapters.open_adapters(tmp_path / "peft")
        [line] = caught.value.problems
        assert line.startswith(f"{file}: {key}"), (text, line)
        assert "; allowed: " in line
        assert "; nearest: " in line


def test_a_folder_without_tensors_is_refused_before_a_model_is_made(tmp_path):
    foreign(tmp_path / "peft", {})
    config = config_of("gpt2", init_from=str(tmp_path / "peft"))
    [line] = preflight.check(config, tmp_path / "run", 0)
    file = tmp_path / "peft" / "adapter_model.safetensors"
    assert line.startswith(f"init_from: {file}: got no tensors; allowed: lora_A and lora_B of matrices; nearest: ")


@pytest.mark.parametrize("name", ["gpt2", "phi3"])
def test_a_run_states_that_one_lora_a_of_several_matrices_becomes_several(name, tmp_path, capsys):
    """peft adapts the one matrix of queries, keys and values; this run trains three pairs."""
    shapes = OF_GPT2
    if name == "phi3":
        size = names.sizes(folder.open_folder(FIXTURES / name).model.options)
        module, num_outputs = "model.layers.{}.self_attn.qkv_proj.lora_{}", size["J"] * size["H"]
        pair = {"A": (2, size["D"]), "B": (num_outputs, 2)}
        shapes = {module.format(layer, end): pair[end] for layer in range(size["L"]) for end in "AB"}
    foreign(tmp_path / "peft", shapes, base_model_name_or_path=str(FIXTURES / name))
    targets = "^layers/attention/query$|^layers/attention/key$|^layers/attention/value$"
    for lora in (LoraOptions(rank=2, alpha=3.0, targets=targets), LoraOptions()):
        config = config_of(name, init_from=str(tmp_path / "peft"), init_base=str(FIXTURES / name), lora=lora)
        assert preflight.check(config, tmp_path / "run", 0) == []
        base_weights.refuse_other_weights(assemble(config, dict.fromkeys(AXES, 1), jax.devices()), tmp_path / "run")
        said = capsys.readouterr().err
        one = "layers/attention/query, layers/attention/key, layers/attention/value share a lora_A, but this"
        assert said.count(one) == bool(lora.rank)


def test_tensors_that_no_matrix_takes_are_named(tmp_path):
    model = folder.open_folder(FIXTURES / "gpt2").model
    others = {"transformer.wte.lora_A": (2, 8), "transformer.h.1.mlp.c_fc.lora_A": (2, 32)}  # of one layer
    for number, shapes in enumerate((others, {**OF_GPT2, ATTENTION.format(1, "B"): (96, 3)})):
        foreign(tmp_path / str(number), shapes)
        with pytest.raises(UserError) as caught:
            adapters.factors(adapters.open_adapters(tmp_path / str(number)), str(FIXTURES / "gpt2"), model.options)
        assert len(caught.value.problems) == (2, 4)[number]
        assert "allowed: lora_A [2, inputs] and lora_B [outputs, 2] of all layers" in caught.value.problems[0]


def config_of(name, **changes):
    """A short run from a folder's weights, with adapters."""
    return dataclasses.replace(
        of_folder(FIXTURES / name),
        init_from=changes.pop("init_from", str(FIXTURES / name)),
        lora=changes.pop("lora", LoraOptions(rank=4)),
        num_steps=2,
        batch_size=4,
        sequence_length=24,
        eval_every=0,
        sample_tokens=0,
        data=DataOptions(source="synthetic", num_threads=0),
        learning_rate=LearningRateOptions(name="constant", peak=0.1, warmup_steps=0),
        observe=ObserveOptions(progress=False, tensorboard=False),
        **changes,
    )


@pytest.mark.parametrize(
    ("name", "mesh"),
    [("gpt2", MeshOptions()), pytest.param("llama-tied-headdim", MeshOptions(pipeline=2), marks=pytest.mark.slow)],
)
def test_after_training_the_merged_export_computes_what_the_run_does_and_not_the_base(name, mesh, tmp_path, capsys):
    """GPT-2 has transposed matrices and ties its head to the table; the other one has stages."""
    result = training.train(config_of(name, mesh=mesh), tmp_path / "run")
    merged, peft = tmp_path / "merged", tmp_path / "peft"
    assert hugging_face.main(["export", f"--workdir={tmp_path / 'run'}", f"--to={merged}", "--dtype=float32"]) == 0
    assert hugging_face.main(["export", f"--workdir={tmp_path / 'run'}", f"--to={peft}", "--adapters"]) == 0
    said = capsys.readouterr().out.splitlines()[-1]
    assert said.endswith(f"adapters of a {folder.open_folder(merged).model.family}; base model: {FIXTURES / name}")
    shutil.copy(FIXTURES / name / "expected.npz", merged)
    got, of_base = logits_of(merged, dict.fromkeys(AXES, 1))
    with np.load(merged / "expected.npz") as file:
        own = computed(result.assembly, result.state.params, file["input_ids"])[..., : got.shape[-1]]
    largest = np.abs(own).max()
    np.testing.assert_allclose(got, own, rtol=0, atol=1e-5 * largest)
    assert np.abs(own - of_base).max() > 0.1 * largest
    assert {path.name for path in peft.iterdir()} == {"adapter_config.json", "adapter_model.safetensors"}
    assert json.loads((peft / "adapter_config.json").read_text())["base_model_name_or_path"] == str(FIXTURES / name)
    trains_on = config_of(name, mesh=mesh, init_from=str(peft))
    merges = dataclasses.replace(trains_on, lora=LoraOptions(), precision=PrecisionOptions())
    for config, opened in ((trains_on, None), (merges, folder.open_folder(merged))):
        assembly = assemble(config, result.assembly.mesh.shape, jax.devices()[: result.assembly.mesh.size])
        base_weights.refuse_other_weights(assembly, tmp_path / "next")
        got = kept_params(assembly, initial_state.initial_state(assembly).params)
        wanted = result.assembly, result.state.params
        wanted = folder.read(opened, assembly.states.kept.params) if opened else kept_params(*wanted)
        near = functools.partial(np.testing.assert_allclose, rtol=0, atol=1e-6 if opened else 0)
        jax.tree.map(near, got, wanted)
