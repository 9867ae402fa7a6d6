"""Models of each family give the logits that the package transformers computed, on one device, on meshes, by cache."""

import re
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

from meshtrain.hf import export, folder
from meshtrain.sharding.param_sharding import activation_sharding
from meshtrain.sharding.rules import AXES
from tests.hf.models import FIXTURES, NAMES, assembled, logits_of

ONE = dict.fromkeys(AXES, 1)
SHARDED, IN_STAGES = ONE | {"fsdp": 4, "tensor": 2}, ONE | {"fsdp": 2, "pipeline": 2, "tensor": 2}
STAGES = {"gemma3": ONE | {"pipeline": 3, "tensor": 2}}  # it has three layers
# One folder for each way in which tensors become weights: alone, in several files, transposed and fused, with biases,
# norms of whole projections, four norms, experts, latents, and blocks of 4 bits. The others are read the same way.
LAYOUTS = (
    "deepseek-v3", "gemma3", "gpt-oss-mxfp4", "gpt2", "llama", "llama-bf16-sharded", "mixtral", "olmo2",
    "phi3", "qwen2",
)  # fmt: skip
# These have layers that differ by their number.
BY_LAYER = ("gemma2", "gpt-oss", "olmo3", "smollm3")
TOLERANCE = 1e-4  # absolute; leaving out a feature moves logits by 0.2 to 15, which teeth.json lists


class Bar:
    """What a bar is told."""

    def __init__(self, **options):
        self.options, self.counts = options, []
        self.update = self.counts.append

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass


def check(name, shape):
    got, expected = logits_of(FIXTURES / name, shape)
    assert np.abs(expected).max() > 1
    np.testing.assert_allclose(got, expected, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("name", NAMES)
def test_logits_are_those_of_transformers(name):
    check(name, ONE)


@pytest.mark.parametrize("name", LAYOUTS)
def test_logits_of_sharded_weights_are_the_same(name):
    check(name, SHARDED)


@pytest.mark.parametrize("name", ["mixtral", "qwen3-moe", "gpt-oss", "gpt-oss-mxfp4"])
def test_logits_of_experts_on_several_devices_are_the_same(name):
    check(name, ONE | {"expert": 4, "tensor": 2})


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted({*LAYOUTS, *BY_LAYER, *STAGES}))
def test_logits_in_a_pipeline_are_the_same(name):
    check(name, STAGES[name] if name in STAGES else IN_STAGES)


CACHED = [*((name, "one device") for name in NAMES), *((name, "sharded") for name in (*LAYOUTS, *BY_LAYER))]
CACHED += [(name, "in stages") for name in ("gpt2", "mistral-window", "mixtral", "qwen3")]


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        pytest.param(*case, marks=() if case == ("llama3-rope-scaled", "one device") else pytest.mark.slow)
        for case in CACHED
    ],
)
def test_logits_of_one_token_after_the_other_are_the_same(name, shape):
    """With keys and values from a cache; the first tokens are the prompt. A pipeline is folded into other axes."""
    axes = {"one device": ONE, "sharded": SHARDED, "in stages": IN_STAGES}[shape]
    assembly, params, (ids, expected) = assembled(FIXTURES / name, axes, folds_pipeline=True)
    decode, given, (num_rows, length) = assembly.task.decode, 12, assembly.batch["tokens"].shape
    entries = decode.cache(num_rows, given, length - given)

    def logits_of_ids(params, ids):
        cache = {
            key: jax.lax.with_sharding_constraint(
                jnp.zeros(entry.shape, entry.dtype),
                activation_sharding(entry.shape, entry.axes, assembly.placed.rules, assembly.mesh, path="cache"),
            )
            for key, entry in entries.items()
        }
        first, cache = decode.prefill(params, ids[:, :given], jnp.full(num_rows, given), cache)

        def step(cache, tokens):
            logits, cache = decode.step(params, tokens, cache)
            return cache, logits

        _, others = jax.lax.scan(step, cache, ids[:, given:].T)
        return jnp.concatenate([first[:, None], others.transpose(1, 0, 2)], axis=1)

    found = jax.jit(logits_of_ids)(params, np.resize(ids, (num_rows, length)))
    got = np.asarray(found)[: len(ids), :, : expected.shape[-1]]
    np.testing.assert_allclose(got, expected[:, given - 1 :], rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize(
    ("name", "router"), [("mixtral", "mlp"), ("mixtral", "block_sparse_moe"), ("qwen3-moe", "mlp")]
)
def test_a_tensor_for_all_experts_of_a_layer_gives_the_same_weights(name, router, tmp_path):
    """As newer versions of transformers have it in memory, and some files: gates before what they multiply."""
    opened = folder.open_folder(FIXTURES / name)
    tensors, size = folder.tensor_files.open_tensors(opened.stored), folder.names.sizes(opened.model.options)
    path_of = {weight.path.rpartition("/")[2]: weight for weight in opened.table if "/experts/" in weight.path}
    kept = {key: array for key, array in tensors.items() if ".experts." not in key and "gate.weight" not in key}
    for layer in range(2):
        of_experts = {
            part: np.stack([tensors[path_of[part].name.format(layer, expert)] for expert in range(4)])
            for part in ("gate", "up", "down")
        }
        prefix = f"model.layers.{layer}"
        kept[f"{prefix}.mlp.experts.gate_up_proj"] = np.concatenate([of_experts["gate"], of_experts["up"]], axis=1)
        kept[f"{prefix}.mlp.experts.down_proj"] = of_experts["down"]
        kept[f"{prefix}.{router}.gate.weight"] = tensors[path_of["router"].name.format(layer)]
    assert kept["model.layers.0.mlp.experts.gate_up_proj"].shape == (4, 2 * size["X"], size["D"])
    shapes = {key: array.shape for key, array in kept.items()}
    export.write_file(tmp_path / "model.safetensors", shapes, kept.values(), "float32")
    shutil.copy(FIXTURES / name / "config.json", tmp_path)
    fused = folder.open_folder(tmp_path)
    table = {weight.path: weight for weight in fused.table}
    ours, theirs = folder.tensor_files.open_tensors(fused.stored), {weight.path: weight for weight in opened.table}
    one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    for part in ("gate", "up", "down", "router"):
        path = f"layers/experts/{part}"
        found = []
        for rows, stored in ((table, ours), (theirs, tensors)):
            row = rows[path]
            stack = folder.names.stack(row, size)
            views = [folder.names.as_ours(stored[key], row, size) for key in folder.names.tensor_names(row, size)]
            shape = (*stack, *(size[letter] for letter in row.layout.split()))
            leaf = jax.ShapeDtypeStruct(shape, np.float32, sharding=one)
            found.append(np.asarray(folder.array(views, leaf, Bar().update, stack=stack)))
        np.testing.assert_array_equal(*found)


def test_a_host_makes_one_shard_at_a_time(monkeypatch):
    """Its buffers are as large as a shard, and each is on its devices before the next one is made."""
    bars = []
    monkeypatch.setattr(folder, "tqdm", lambda **options: bars.append(Bar(**options)) or bars[-1])
    opened = folder.open_folder(FIXTURES / "llama")
    sharding = jax.sharding.NamedSharding(jax.make_mesh((4, 2), ("x", "y")), jax.P(None, "x", "y"))
    shape = (2, 32, 48)
    tree = {"layers": {"mlp": {"up": jax.ShapeDtypeStruct(shape, np.float32, sharding=sharding)}}}
    made = []
    zeros = np.zeros
    monkeypatch.setattr(folder.np, "zeros", lambda size, dtype: made.append(tuple(size)) or zeros(size, dtype))
    monkeypatch.setattr(folder, "refuse_other_params", lambda *_: None)  # the other leaves are left out
    up = folder.read(opened, tree)["layers"]["mlp"]["up"]
    assert made == [(2, 8, 24)] * 8
    [bar] = bars
    assert (bar.options["unit"], bar.options["total"], bar.counts) == ("B", up.nbytes, [up.nbytes // 8] * 8)
    assert up.sharding == sharding
    tensors = folder.tensor_files.open_tensors(opened.stored)
    want = np.stack([tensors[f"model.layers.{layer}.mlp.up_proj.weight"].T for layer in range(2)])
    np.testing.assert_array_equal(np.asarray(up), want)


def test_a_shard_of_the_layers_has_its_own_layers():
    opened = folder.open_folder(FIXTURES / "llama")
    table = {weight.path: weight for weight in opened.table}
    sharding = jax.sharding.NamedSharding(jax.make_mesh((2,), ("x",)), jax.P("x"))
    leaf = jax.ShapeDtypeStruct((2, 32), np.float32, sharding=sharding)
    tensors = folder.tensor_files.open_tensors(opened.stored)
    views = [tensors[table["layers/mlp_norm/scale"].name.format(layer)] for layer in range(2)]
    np.testing.assert_array_equal(np.asarray(folder.array(views, leaf, Bar().update, stack=(2,))), np.stack(views))


def test_a_part_of_a_matrix_in_4_bits_is_decoded_from_its_blocks_alone():
    """Byte 0x52 is 1 and then 3; of the exponents 127 is 1, and 129 is 4."""
    numbers = np.full((3, 2, 16), 0x52, np.uint8)
    exponents = np.array([[127, 127], [127, 129], [127, 127]], np.uint8)
    read = []

    class Watched(np.ndarray):
        def __getitem__(self, part):
            read.append(part)
            return np.asarray(self)[part]

    packed = folder.mxfp4.Packed(numbers.view(Watched), exponents.view(Watched))
    np.testing.assert_array_equal(packed[slice(61, 66), slice(1, 2)], [[12], [4], [12], [1], [3]])
    assert read == [(slice(1, 3), slice(1, 2))] * 2


def test_tensors_in_4_bits_that_do_not_fit_are_refused_in_a_line_each(tmp_path):
    shutil.copytree(FIXTURES / "gpt-oss-mxfp4", tmp_path, dirs_exist_ok=True)
    arrays = folder.tensor_files.open_tensors(folder.tensor_files.tensors(tmp_path)[0])
    experts = "model.layers.1.mlp.experts"
    arrays[f"{experts}.down_proj_scales"] = arrays[f"{experts}.down_proj_scales"][:, :1]
    del arrays[f"{experts}.gate_up_proj_scales"]
    kept = {name: np.asarray(array) for name, array in arrays.items()}
    kept[f"{experts}.down_proj_blocks"] = kept[f"{experts}.down_proj_blocks"].astype(np.float32)
    save_file(kept, tmp_path / "model.safetensors")
    with pytest.raises(folder.UserError) as error:
        folder.open_folder(tmp_path)
    lines = sorted(line.partition(f"{experts}.")[2] for line in error.value.problems)
    assert lines[0].startswith("down_proj_blocks: got dtype F32; allowed: U8; nearest: ")
    assert lines[1].startswith("down_proj_scales: got shape [4, 1, 1]; allowed: [4, 64, 1], by config.json")
    assert lines[2].startswith("gate_up_proj_scales: not in the files; ")
    assert len(lines) == 3


def test_padding_of_the_vocabulary_is_zero():
    opened = folder.open_folder(FIXTURES / "llama")
    one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    view = np.ones((119, 32), np.float32)
    leaf = jax.ShapeDtypeStruct((128, 32), np.float32, sharding=one)
    table = np.asarray(folder.array([view], leaf, Bar().update, stack=()))
    assert opened.model.options.padded_vocab_size == 128
    assert (table[:119] == 1).all()
    assert (table[119:] == 0).all()


def test_tensors_of_images_are_left_out_and_counted(tmp_path):
    """With both prefixes that files have; a head of its own has the second one's outside."""
    opened = folder.open_folder(FIXTURES / "mistral3-images")
    assert opened.left_out == 15
    shutil.copytree(FIXTURES / "mistral3-images", tmp_path, dirs_exist_ok=True)
    arrays = folder.tensor_files.open_tensors(folder.tensor_files.tensors(tmp_path)[0])
    renamed = {re.sub(r"^language_model\.(model\.)?", lambda old: "model.language_model." if old[1] else "", key): array
               for key, array in arrays.items()}  # fmt: skip
    export.write_file(
        tmp_path / "model.safetensors", {k: a.shape for k, a in renamed.items()}, renamed.values(), "float32"
    )
    other = folder.open_folder(tmp_path)
    assert {row.path for row in other.table} == {row.path for row in opened.table}
    assert "lm_head.weight" in other.stored
    assert "model.language_model.norm.weight" in other.stored


def test_a_leaf_that_the_folder_lacks_is_named():
    opened = folder.open_folder(FIXTURES / "llama")
    leaf = jax.ShapeDtypeStruct((2, 32, 40), np.float32)
    with pytest.raises(folder.UserError) as error:
        folder.refuse_other_params(opened, {"layers": {"mlp": {"up": leaf}}, "extra": leaf})
    lines = error.value.problems
    assert any("llama: extra: in this run, not in the folder" in line for line in lines)
    assert any("llama: layers/mlp/up: got shape [2, 32, 40]; allowed: [2, 32, 48]" in line for line in lines)
    assert any("llama: layers/mlp/down: in the folder, not in this run" in line for line in lines)
