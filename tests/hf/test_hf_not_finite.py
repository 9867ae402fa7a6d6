"""NaN or infinity in the weights of a folder: a warning names the tensor wherever they are read or written."""

import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshtrain import hugging_face
from meshtrain.hf import adapters, export, folder, names, tensor_files
from tests.hf.models import FIXTURES, NAMES

ONE = jax.sharding.SingleDeviceSharding(jax.devices()[0])
ENDING = "; the model's outputs may be NaN"


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16, np.float16, np.float64])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_one_such_number_is_found_at_any_place(dtype, value):
    numbers = np.full((3, 1 << 17), jnp.finfo(dtype).max, dtype)
    assert tensor_files.has_only_finite(numbers)
    assert tensor_files.has_only_finite(-numbers[:0])
    for place in ((0, 0), (1, 7), (2, -1)):
        numbers[place] = value
        assert not tensor_files.has_only_finite(numbers)
        numbers[place] = 0


def tree_of(opened, dtype=np.float32):
    """Abstract parameters of a folder, on one device."""
    size, tree = names.sizes(opened.model.options), {}
    for weight in opened.table:
        *groups, name = weight.path.split("/")
        group = tree
        for one in groups:
            group = group.setdefault(one, {})
        shape = (*names.stack(weight, size), *(size[letter] for letter in weight.layout.split()))
        group[name] = jax.ShapeDtypeStruct(shape, dtype, sharding=ONE)
    return tree


def broken(name, target, tensor, value):
    """Copies a fixture with one number of a tensor replaced; the header and the index stay."""
    shutil.copytree(FIXTURES / name, target)
    stored = tensor_files.tensors(target)[0][tensor]
    kind = {"F32": np.float32, "BF16": jnp.bfloat16}[stored.dtype]
    with stored.file.open("r+b") as file:
        file.seek(stored.begin)
        file.write(np.asarray(value, kind).tobytes())
    return target


@pytest.mark.parametrize("name", [name for name in NAMES if name not in ("gpt-oss-mxfp4", "deepseek-v3-plain")])
def test_reading_names_the_tensor(name, tmp_path, capsys):
    """The first and the last of its own, of an expert and of a layer alike."""
    stored = sorted(folder.open_folder(FIXTURES / name).stored)
    for number, tensor in enumerate({stored[0], stored[len(stored) // 2], stored[-1]}):
        opened = folder.open_folder(broken(name, tmp_path / str(number), tensor, (np.nan, np.inf, -np.inf)[number]))
        folder.read(opened, tree_of(opened))
        assert f"WARNING: {opened.directory}: NaN or infinity in {tensor}{ENDING}" in capsys.readouterr().err
    opened = folder.open_folder(FIXTURES / name)
    folder.read(opened, tree_of(opened))
    assert capsys.readouterr().err == ""


def test_import_and_export_name_it_and_keep_it(tmp_path, capsys):
    came = broken("llama", tmp_path / "came", "model.norm.weight", np.nan)
    hugging_face.main(["import", str(came), f"--to={tmp_path / 'run'}"])
    assert f"{came}: NaN or infinity in model.norm.weight{ENDING}" in capsys.readouterr().err
    hugging_face.main(["export", f"--workdir={tmp_path / 'run'}", f"--to={tmp_path / 'out'}"])
    said = capsys.readouterr().err
    assert f"model.safetensors in float32: NaN or infinity in model.norm.weight{ENDING}" in said


def test_numbers_that_a_smaller_dtype_does_not_hold_are_named(tmp_path, capsys):
    shapes = {f"t{number}": (2,) for number in range(5)}
    export.write_file(tmp_path / "x.safetensors", shapes, [np.float32([1e30, 1])] * 5, "float16")
    line = f"x.safetensors in float16: NaN or infinity in t0, t1, t2 and 2 more tensors{ENDING}"
    assert line in capsys.readouterr().err


def test_adapters_and_weights_by_name_are_looked_at_too(tmp_path, capsys):
    export.write_file(tmp_path / adapters.WEIGHTS_FILE, {"w": (2,)}, [np.float32([np.nan, 0])], "float32")
    capsys.readouterr()
    like = {"w": jax.ShapeDtypeStruct((2,), np.float32, sharding=ONE)}
    folder.read_by_name(tmp_path, like)
    assert f"{tmp_path}: NaN or infinity in w{ENDING}" in capsys.readouterr().err
    pair = (np.full((2, 3), np.inf, np.float32), np.zeros((4, 2), np.float32))
    leaves = {"q_lora_a": (1, 3, 2), "q_lora_b": (1, 2, 4)}
    own = {path: jax.ShapeDtypeStruct(shape, np.float32, sharding=ONE) for path, shape in leaves.items()}
    adapters.read({"q": [pair]}, own)
    assert f"{adapters.WEIGHTS_FILE}: NaN or infinity in q_lora_a{ENDING}" in capsys.readouterr().err
