"""Several processes read one folder: each copies its own shards alone, from the files in which they stand."""

import json
import os
import pathlib
import shutil
import subprocess
import sys

import numpy as np
import pytest

from meshtrain.hf import export, tensor_files
from tests.hf.models import FIXTURES

ROOT = pathlib.Path(__file__).parents[2]
FILES = ("layers.0", "layers.1", "rest")
LIMIT_SECONDS = 300
# Writes, for each axis of size 2: the bytes that were copied, and KiB of each file that are in this process' memory.
PROGRAM = """
import json, os, pathlib, re, sys
import numpy as np
from meshtrain.assembly.assemble import assemble
from meshtrain.config.schema import Config
from meshtrain.hf import folder
from meshtrain.launch import distributed
from meshtrain.sharding.rules import AXES
from meshtrain.run import weights

here, found = pathlib.Path(sys.argv[1]), {}
devices, _ = distributed.start(2)
copy, maps, opened = folder._fill, [], folder.tensor_files.open_tensors
folder.tensor_files.open_tensors = lambda stored: maps.append(opened(stored)) or maps[-1]  # mapped until the end

for axis in ("fsdp", "pipeline"):
    model, copied = folder.open_folder(here / axis).model, []
    folder._fill = lambda target, source: copied.append(source.nbytes) or copy(target, source)
    config = Config(model=model.options, batch_size=8, sequence_length=8)
    assembly = assemble(config, dict.fromkeys(AXES, 1) | {axis: 2}, devices)
    params, _ = weights.restore_params(here / axis, None, assembly.states.kept.params)
    [shard] = params["layers"]["mlp_norm"]["scale"].addressable_shards
    resident, name = {}, ""
    for line in pathlib.Path("/proc/self/smaps").read_text().splitlines():
        if re.match("[0-9a-f]+-[0-9a-f]+ ", line):
            name = line.split()[-1]
        elif line.startswith("Rss:") and str(here / axis) in name:
            resident[pathlib.Path(name).stem] = int(line.split()[1])
    found[axis] = {"copied": sum(copied), "resident": resident, "norms": np.asarray(shard.data).tolist()}
(here / os.environ["JAX_PROCESS_ID"]).write_text(json.dumps(found))
"""


def file_of(name):
    return next((layer for layer in FILES[:2] if f".{layer}." in name), "rest")


@pytest.fixture(scope="module")
def tensors():
    found, _ = tensor_files.tensors(FIXTURES / "llama")
    return tensor_files.open_tensors(found)


@pytest.fixture(scope="module")
def found(tmp_path_factory, tensors):
    """What the program wrote in each of two processes; each layer has its own file, the other weights the third."""
    work = tmp_path_factory.mktemp("read")
    for axis in ("fsdp", "pipeline"):
        (work / axis).mkdir()
        shutil.copy(FIXTURES / "llama" / "config.json", work / axis)
        for file in FILES:
            own = {name: tensor for name, tensor in tensors.items() if file == file_of(name)}
            shapes = {name: one.shape for name, one in own.items()}
            export.write_file(work / axis / f"{file}.safetensors", shapes, own.values(), "float32")
    command = [sys.executable, "-m", "meshtrain.launch", "--processes=2", "--devices=1", "--", "-c", PROGRAM, work]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "JAX_PLATFORMS": "cpu"}, capture_output=True, text=True,
        timeout=LIMIT_SECONDS,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads((work / str(process)).read_text()) for process in (0, 1)]


@pytest.mark.slow
@pytest.mark.parametrize("axis", ["fsdp", "pipeline"])
def test_each_process_copies_half_of_the_bytes(axis, found, tensors):
    """But for norms, which both have, and rows of the vocabulary: the last rows are padding, which no file has."""
    total = sum(tensor.nbytes for tensor in tensors.values())
    in_both = sum(tensor.nbytes for name, tensor in tensors.items() if "norm" in name)
    copied = [one[axis]["copied"] for one in found]
    assert total <= sum(copied) <= total + in_both
    assert max(copied) <= 1.03 * total / 2


@pytest.mark.slow
def test_each_stage_reads_the_files_of_its_layers_alone(found, tensors):
    for process, one in enumerate(found):
        resident = one["pipeline"]["resident"]
        assert set(resident) == set(FILES)
        assert resident[f"layers.{process}"] > 0
        assert resident[f"layers.{1 - process}"] == 0, "a page of it was touched"
        norms = tensors[f"model.layers.{process}.post_attention_layernorm.weight"]
        np.testing.assert_array_equal(np.asarray(one["pipeline"]["norms"], np.float32), norms[None])
