"""Crafted and damaged files: one line for each problem, all of them at once, before a tensor is read."""

import json
import re
import shutil
import struct

import numpy as np
import pytest

from meshtrain.errors import UserError
from meshtrain.hf import folder, tensor_files
from tests.hf.models import FIXTURES

F32_2 = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


def write(path, header, data=b"\0" * 8):
    """Writes a safetensors file; a header may be bytes, JSON or not."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def entry(**changes):
    return {"w": F32_2 | changes}


HEADERS = {
    "no JSON": b"{not",
    "a list": b"[]",
    "not UTF-8": b'{"\xff": 1}',
    "too deep": b"[" * 100_000 + b"]" * 100_000,
    "a name twice": b'{"w": %b, "w": %b}' % ((json.dumps(F32_2).encode(),) * 2),
    "no object": {"w": 3},
    "no offsets": {"w": {"dtype": "F32", "shape": [2]}},
    "dtype unknown": entry(dtype="F33"),
    "dtype a list": entry(dtype=["F32"]),
    "shape negative": entry(shape=[-2]),
    "shape of many numbers": entry(shape=[10**4000] * 2500),
    "shape of many digits": entry(shape=[10**4000]),
    "shape true": entry(shape=[True, 2]),
    "shape huge": entry(shape=[2**70]),
    "shape whose product overflows": entry(shape=[2**32, 2**32, 2]),
    "offsets beyond": entry(shape=[4], data_offsets=[0, 16]),
    "offsets negative": entry(data_offsets=[-8, 0]),
    "offsets backwards": entry(data_offsets=[8, 0]),
    "offsets of a float": entry(data_offsets=[0, 8.0]),
    "size": entry(shape=[1]),
    "overlap": {"a": F32_2, "b": F32_2 | {"shape": [1], "data_offsets": [4, 8]}},
    "a gap": entry(shape=[1], data_offsets=[4, 8]),
    "bytes at the end": entry(shape=[1], data_offsets=[0, 4]),
}


@pytest.mark.parametrize("name", HEADERS)
def test_a_crafted_header_is_one_line(name, tmp_path):
    path = tmp_path / tensor_files.ONE_FILE
    write(path, HEADERS[name])
    found, [line] = tensor_files.tensors(tmp_path)
    assert found == {}
    assert line.startswith(f"{path}: not safetensors (")
    assert line.endswith("; allowed: a complete safetensors file; nearest: download it again")


def test_each_damaged_file_is_a_line(tmp_path):
    for name in ("a", "b"):
        write(tmp_path / f"{name}.safetensors", entry(shape=[3]))
    first, second = tensor_files.tensors(tmp_path)[1]
    assert "a.safetensors: not safetensors" in first
    assert "b.safetensors: not safetensors" in second


@pytest.mark.timeout(120)  # two seconds; comparing each name with all others took many minutes
def test_a_header_of_a_hundred_thousand_names_is_read_in_seconds(tmp_path):
    names = [f"model.layers.{number}.mlp.experts.weight" for number in range(100_000)]
    write(
        tmp_path / tensor_files.ONE_FILE, {name: F32_2 | {"shape": [0], "data_offsets": [0, 0]} for name in names}, b""
    )
    found, lines = tensor_files.tensors(tmp_path)
    assert (len(found), lines) == (100_000, [])


@pytest.mark.parametrize("content", [b"\x08\0\0", struct.pack("<Q", 2**63) + b"{}", struct.pack("<Q", 3) + b"{}"])
def test_a_length_that_the_file_does_not_have_is_refused(content, tmp_path):
    (tmp_path / tensor_files.ONE_FILE).write_bytes(content)
    [line] = tensor_files.tensors(tmp_path)[1]
    assert re.search(r": not safetensors \(.*header (too small|too large|length)", line)


def test_a_good_file_is_read_as_it_is(tmp_path):
    values = np.arange(6, dtype="<f4")
    header = {"__metadata__": {"format": "pt"}, "b": F32_2 | {"data_offsets": [16, 24]}}
    header["a"] = F32_2 | {"shape": [2, 2], "data_offsets": [0, 16]}
    write(tmp_path / "x.safetensors", header, values.tobytes())
    found, lines = tensor_files.tensors(tmp_path)
    assert lines == []
    views = tensor_files.open_tensors(found)
    np.testing.assert_array_equal(views["a"], [[0, 1], [2, 3]])
    np.testing.assert_array_equal(views["b"], [4, 5])


def test_tensors_of_all_dtypes_lie_one_after_the_other(tmp_path):
    sizes = {"BOOL": (3, 3), "F4": (4, 2), "F8_E4M3": (5, 5), "I64": (1, 8), "F6_E2M3": (4, 3), "F16": (2, 4)}
    header, end = {}, 0
    for dtype, (length, num_bytes) in sizes.items():
        header[dtype] = {"dtype": dtype, "shape": [length], "data_offsets": [end, end := end + num_bytes]}
    write(tmp_path / tensor_files.ONE_FILE, header, b"\0" * (end - 4) + np.array([1, 2], "<f2").tobytes())
    found, lines = tensor_files.tensors(tmp_path)
    assert (list(found), lines) == (list(sizes), [])
    np.testing.assert_array_equal(tensor_files.open_tensors({"F16": found["F16"]})["F16"], [1, 2])


def lines_of(directory):
    with pytest.raises(UserError) as refused:
        folder.open_folder(directory)
    return list(refused.value.problems)


def indexed(tmp_path, change):
    """Returns a copy of the model in three files, with a changed index."""
    copied = shutil.copytree(FIXTURES / "llama-bf16-sharded", tmp_path / "copy")
    index = json.loads((copied / tensor_files.INDEX_FILE).read_text())
    change(index["weight_map"])
    (copied / tensor_files.INDEX_FILE).write_text(json.dumps(index))
    return copied


NORM = "model.norm.weight"


@pytest.mark.parametrize("file", ["../x.safetensors", "/etc/passwd", "a\\b", "a\0b", "", ".", "..", 3, None])
def test_an_index_names_files_of_its_folder_alone(file, tmp_path):
    lines = lines_of(indexed(tmp_path, lambda placed: placed.update({NORM: file})))
    assert any(
        f"{tensor_files.INDEX_FILE}: {NORM}: got {str(file)!r}; allowed: a file's name in" in line for line in lines
    ), lines


def test_problems_of_index_files_and_config_come_together(tmp_path):
    copied = indexed(tmp_path, lambda placed: placed.update({NORM: "gone.safetensors", "more": placed[NORM]}))
    config = json.loads((copied / "config.json").read_text())
    (copied / "config.json").write_text(json.dumps(config | {"quantization_config": {"bits": 4}, "hidden_act": "gelu"}))
    lines = lines_of(copied)
    for part in (
        "quantization_config: got {'bits': 4}",
        "hidden_act: got 'gelu'",
        "gone.safetensors: got nothing there",
        "more: not in model-",
    ):
        assert sum(part in line for line in lines) == 1, (part, lines)
    assert len(lines) == 4, "the index lists the tensor whose file is gone"


def test_files_that_belong_to_another_model_are_compared_by_name_shape_and_dtype(tmp_path):
    copied = shutil.copytree(FIXTURES / "llama", tmp_path / "copy")
    raw = (copied / tensor_files.ONE_FILE).read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    header["model.norms.weight"] = header.pop(NORM)
    gate = header["model.layers.1.mlp.gate_proj.weight"]
    gate["shape"] = gate["shape"][::-1]
    header["lm_head.weight"]["dtype"] = "I32"
    write(copied / tensor_files.ONE_FILE, header, raw[8 + length :])
    lines = lines_of(copied)
    for part in (
        f"{NORM}: not in the files",
        "did you mean 'model.norms.weight'?",
        "norms.weight: the model in",
        "gate_proj.weight: got shape [32, 48]; allowed: [48, 32]",
        "lm_head.weight: got dtype I32",
    ):
        assert sum(part in line for line in lines) == 1, (part, lines)
    assert len(lines) == 4, lines


def test_pickles_are_not_opened(tmp_path):
    shutil.copy(FIXTURES / "llama" / "config.json", tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04")
    [line] = lines_of(tmp_path)
    assert "got pytorch_model.bin, a pickle, which may run code; allowed: safetensors" in line


def test_a_tensor_in_two_files_without_an_index_is_refused(tmp_path):
    for name in ("a", "b"):
        write(tmp_path / f"{name}.safetensors", entry())
    [line] = tensor_files.tensors(tmp_path)[1]
    assert "b.safetensors: w: it is also in a.safetensors" in line
