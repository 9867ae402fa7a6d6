import pathlib

import jax
import pytest

from meshtrain.config.mesh_checks import check
from meshtrain.config.resolve import parse
from meshtrain.config.tasks import abstract_task, abstract_weights, find
from meshtrain.models.transformer.task import count_parameters
from meshtrain.sharding.rules import AXES

pytestmark = pytest.mark.quick

ROOT = pathlib.Path(__file__).parents[2]
FILES = sorted((ROOT / "configs").glob("*.py"))

# Without the padding of the vocabulary, from shapes alone.
NUM_PARAMETERS = {
    "3d": (1_115_520, "1.12 M"),
    "data": (1_115_520, "1.12 M"),
    "fsdp": (1_115_520, "1.12 M"),
    "tensor": (1_115_520, "1.12 M"),
    "hybrid": (1_115_520, "1.12 M"),
    "pipeline": (2_165_120, "2.17 M"),
    "tiny": (558_272, "0.56 M"),
    "gpt2_124m": (124_439_808, "124.4 M"),
    "llama_1b": (1_235_814_400, "1.24 B"),
    "llama3_8b": (8_030_261_248, "8.03 B"),
    "llama3_8b_long": (8_030_261_248, "8.03 B"),
    "long": (164_352, "0.16 M"),
    "experts": (887_488, "0.89 M"),
    "llama3_70b": (70_553_706_496, "70.55 B"),
    "llama3_405b": (405_853_388_800, "405.9 B"),
    "gpt3_175b": (174_604_259_328, "174.6 B"),
    "mtnlg_530b": (529_581_506_560, "529.6 B"),
    "mixtral_8x7b": (46_702_792_704, "46.7 B"),
    "qwen3_30b_a3b": (30_532_122_624, "30.5 B"),
    "qwen3_235b_a22b": (235_093_634_560, "235.1 B"),
    "deepseek_v3": (671_026_419_200, "671.0 B"),
    "digits": (151_402, "0.15 M"),
    "numbers": (930_304, "0.93 M"),
    "preferences": (788_224, "0.79 M"),
}
# Those that one token goes through: what Jiang et al. 2024 call 12.9 B, Yang et al. 2025 3.3 B and 22 B, and
# DeepSeek-AI 2024 671 B and 37 B.
ACTIVE = {
    "mixtral_8x7b": (12_879_925_248, "12.9 B"),
    "qwen3_30b_a3b": (3_353_032_704, "3.35 B"),
    "qwen3_235b_a22b": (22_190_763_520, "22.2 B"),
    "deepseek_v3": (37_552_297_472, "37.6 B"),
}
MESHES = {
    "3d": (2, 2, 1, 2), "data": (8, 1, 1, 1), "fsdp": (1, 1, 8, 1), "tensor": (1, 1, 1, 8), "hybrid": (2, 1, 4, 1),
    "pipeline": (1, 8, 1, 1), "tiny": (1, 1, 1, 1), "llama3_70b": (1, 1, 2048, 1), "gpt3_175b": (64, 8, 1, 8),
    "mtnlg_530b": (16, 35, 1, 8), "llama3_405b": (64, 14, 1, 8),
}  # fmt: skip


def read(file):
    return parse([f"--config={file}"])[0]


def counted(config):
    if config.task == "decoder":
        return count_parameters(config.model, config.model.max_positions or config.sequence_length)
    if config.task == "preferences":
        return abstract_task(config).num_parameters
    return sum(leaf.size for leaf in jax.tree.leaves(abstract_weights(config, find(config.task))[1]))


def test_every_file_is_listed():
    assert {file.stem for file in FILES} == set(NUM_PARAMETERS)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_each_file_is_legal_and_its_title_page_true(file):
    config, page = read(file), file.read_text().split('"""')[1]
    num_parameters, short = NUM_PARAMETERS[file.stem]
    assert counted(config) == num_parameters
    assert short in page
    assert float(short.split()[0]) == pytest.approx(num_parameters / {"M": 1e6, "B": 1e9}[short[-1]], abs=0.06)
    for word in ("Purpose:", "Parameters:", "Hardware:", "Command:", f"--config=configs/{file.name}"):
        assert word in page


@pytest.mark.parametrize("name", ACTIVE)
def test_active_parameters_and_their_flops(name):
    """A token's FLOPs are six for each weight that it is multiplied with: the active ones but for the look-up."""
    file = ROOT / "configs" / f"{name}.py"
    config, (num_active, short) = read(file), ACTIVE[name]
    task = abstract_task(config)
    assert task.num_active_parameters == num_active
    assert f"{num_active:,} ({short})" in file.read_text()
    assert float(short.split()[0]) == pytest.approx(num_active / 1e9, abs=0.06)
    lookup = config.model.vocab_size * config.model.embed_dim
    assert task.flops_per_token - task.attention_flops_per_token == 6.0 * (num_active - lookup)


@pytest.mark.parametrize("name", MESHES)
def test_meshes(name):
    mesh = read(ROOT / "configs" / f"{name}.py").mesh
    assert (mesh.data, mesh.pipeline, mesh.fsdp, mesh.tensor) == MESHES[name]


def test_tiny_fits_every_mesh_of_eight():
    config = read(ROOT / "configs" / "tiny.py")
    assert config.learning_rate.peak <= 3e-3
    for axis in ("data", "pipeline", "fsdp", "tensor"):
        shape = dict.fromkeys(AXES, 1) | {axis: 8}
        assert check(config, shape) == []


def test_the_530b_model_pads_for_its_mesh():
    model = read(ROOT / "configs" / "mtnlg_530b.py").model
    assert (model.vocab_multiple, model.padded_vocab_size) == (280, 50400)
