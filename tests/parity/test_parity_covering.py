"""One program, any mesh: a table of runs with each pair of axes and each value of each other option at least once.

Each run takes four steps, dropout on and documents packed, and is compared leaf by leaf with plain JAX on one device.
"""

import dataclasses
import itertools

import pytest

from meshtrain.config.schema import Config
from meshtrain.models.remat import RematOptions
from meshtrain.optim import optimizers
from meshtrain.pipeline import schedules
from meshtrain.sharding.offload import OffloadOptions
from meshtrain.sharding.param_sharding import MAX_LEVEL, STRATEGIES, ZeroOptions
from meshtrain.sharding.rules import AXES, LayoutOptions
from tests.parity import runs, test_parity_experts, test_parity_kernels

LLAMA, GPT, QWEN = "llama", "gpt", "qwen"
MODELS = {LLAMA: runs.LLAMA, GPT: runs.GPT, QWEN: runs.QWEN}
MAX_RUNS = 12


@dataclasses.dataclass(frozen=True)
class Run:
    """One row of the table."""

    model: str
    mesh: dict[str, int]
    optimizer: str = "adam"
    clip_norm: float = 0.0
    schedule: str = ""
    zero: int | str = 0
    remat: str = "none"
    remat_every: int = 1
    unroll: bool = False
    accumulation: int = 1
    sequence_parallel: bool = False
    moments_on_host: bool = False

    def __str__(self) -> str:
        mesh = "-".join(f"{axis}{size}" for axis, size in self.mesh.items()) or "one"
        return "-".join(part for part in (self.model, mesh, self.schedule, self.optimizer) if part)

    @property
    def config(self) -> Config:
        """What the row says, in the words of the configuration."""
        num_chunks = 2 if self.schedule == "interleaved_1f1b" else 1
        level = {"strategy": self.zero} if isinstance(self.zero, str) else {"level": self.zero}
        return dataclasses.replace(
            runs.with_optimizer(runs.CONFIG, self.optimizer, self.clip_norm),
            model=MODELS[self.model],
            pipeline=schedules.PipelineOptions(
                schedule=self.schedule or "interleaved_1f1b", num_microbatches=4, num_chunks=num_chunks
            ),
            zero=ZeroOptions(**level),
            remat=RematOptions(self.remat, self.remat_every, self.unroll),
            accumulation_steps=self.accumulation,
            layout=LayoutOptions(sequence_parallel=self.sequence_parallel),
            offload=OffloadOptions(moments=self.moments_on_host),
        )


RUNS = [
    Run(LLAMA, {}),
    Run(LLAMA, {"data": 2, "context": 4}, "lion", zero=1, remat="full", remat_every=2),
    Run(LLAMA, {"data": 2, "fsdp": 2, "context": 2}, "adafactor", zero=2, accumulation=4, remat="offload"),
    Run(GPT, {"data": 2, "tensor": 4}, "sgd", zero=3, accumulation=2, remat="selective"),
    Run(LLAMA, {"fsdp": 4, "tensor": 2}, "muon", remat="save_attention", sequence_parallel=True),
    Run(GPT, {"data": 2, "fsdp": 2, "tensor": 2}, "adamw", 0.3, zero="hybrid_shard", remat="dots", accumulation=2),
    Run(LLAMA, {"data": 4}, zero="shard_grad_op", accumulation=2, unroll=True, moments_on_host=True),
    Run(
        QWEN, {"tensor": 2, "pipeline": 4}, "adamw",
        schedule="1f1b", accumulation=2, sequence_parallel=True, remat="selective",
    ),
    Run(LLAMA, {"data": 2, "pipeline": 4}, schedule="interleaved_1f1b", zero=2),
    Run(GPT, {"context": 2, "tensor": 2, "pipeline": 2}, clip_norm=0.3, schedule="gpipe", remat="full"),
    Run(
        LLAMA, {"data": 2, "fsdp": 2, "pipeline": 2},
        schedule="1f1b", zero="full_shard", remat="save_attention", remat_every=2,
    ),
]  # fmt: skip


@pytest.mark.parametrize(
    "run", [pytest.param(run, marks=pytest.mark.xdist_group(f"parity-{run.model}"), id=str(run)) for run in RUNS]
)
def test_mesh_changes_no_number(run, assert_parity, reference):
    if run.clip_norm:
        assert reference(run.config).grad_norms[0] > run.clip_norm, "nothing is clipped"
    losses = reference(run.config).losses
    assert losses[-1] < losses[0] - 0.005, "the bounds say nothing of a model that stands still"
    assert_parity(run.config, **run.mesh)


def values(name):
    return {getattr(run, name) for run in RUNS}


def choices(options, name):
    [field] = [field for field in dataclasses.fields(options) if field.name == name]
    return set(field.metadata["choices"])


def test_the_table_is_short():
    assert len(RUNS) <= MAX_RUNS
    assert all(run.config.num_steps == runs.NUM_STEPS for run in RUNS)


def test_the_table_has_each_pair_of_axes():
    # The pairs with `expert` are those of the runs that have experts.
    experts = test_parity_experts.WHOLE, *test_parity_experts.CUT, *test_parity_kernels.PIPELINES
    meshes = [run.mesh for run in RUNS] + [mesh for mesh, *_ in experts]
    pairs = {pair for mesh in meshes for pair in itertools.combinations(sorted(mesh), 2)}
    assert pairs == set(itertools.combinations(sorted(AXES), 2))
    assert all(size > 1 for mesh in meshes for size in mesh.values())
    # Of two neighbours each is the next and the previous one: a ring of two sees no wrong direction.
    assert all(max(mesh.get(axis, 1) for mesh in meshes) >= 4 for axis in AXES)


def test_the_table_has_each_value_of_each_other_option():
    assert values("model") == set(MODELS)
    assert values("optimizer") == set(optimizers.NAMES)
    assert values("schedule") - {""} == set(schedules.NAMES)
    assert values("zero") >= {*range(MAX_LEVEL + 1), *STRATEGIES} - {"no_shard"}
    assert values("remat") == choices(RematOptions, "policy")
    assert values("remat_every") > {1}
    assert any(run.config.remat.unrolls for run in RUNS)
    assert values("accumulation") >= {1, 2, 4}
    assert values("sequence_parallel") == values("moments_on_host") == {False, True}
    assert len(values("clip_norm")) > 1


def test_each_schedule_has_a_pipeline_and_each_pipeline_a_schedule():
    assert all(bool(run.schedule) == ("pipeline" in run.mesh) for run in RUNS)
