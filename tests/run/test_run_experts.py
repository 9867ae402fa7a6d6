"""Experts against the dense model of equal active size: what the script trains, and what it says."""

import dataclasses
import re

import pytest

from meshtrain.config.resolve import parse
from meshtrain.config.tasks import abstract_task
from scripts.benchmarks import experts, experts_step


def test_the_dense_model_has_the_work_of_the_experts_of_a_token():
    config, _ = parse(["--config=configs/experts.py", "--config.model.moe.shared_experts=1"])
    sparse, dense = abstract_task(config), abstract_task(experts.dense(config))
    routers = config.model.num_layers * config.model.embed_dim * config.model.moe.num_experts
    assert sparse.num_active_parameters == dense.num_parameters + routers
    assert dense.num_active_parameters == 0


def test_the_benchmark_compares_models_of_the_same_active_size():
    found = experts_step.configurations(8, 64)
    sparse, dense = (abstract_task(found[name]) for name in ("program", "plain"))
    routers = experts_step.DENSE.num_layers * experts_step.DENSE.embed_dim * 8
    assert sparse.num_active_parameters == dense.num_parameters + routers


@pytest.mark.parametrize(
    ("pairs", "line"),
    [
        ([(0.9, 1.0), (1.8, 2.0), (1.1, 1.0)], "experts win: -3.3% in the mean, lower in 2 of 3 seeds"),
        ([(1.1, 1.0), (1.1, 1.0), (0.9, 1.0)], "experts do not win: +3.3% in the mean, lower in 1 of 3 seeds"),
    ],
)
def test_the_verdict_says_who_wins(pairs, line):
    assert experts.verdict(pairs) == line


@pytest.mark.slow
def test_three_steps_of_experts_and_dense(tmp_path, capsys):
    small = {"num_layers": 1, "embed_dim": 16, "moe.expert_dim": 16, "num_heads": 2, "num_kv_heads": 2}
    words = ["--seeds=1", f"--out={tmp_path / 'chart.png'}", "--config.num_steps=3"]
    assert experts.main([*words, *(f"--config.model.{name}={size}" for name, size in small.items())]) == 0
    row, _, said = capsys.readouterr().out.splitlines()[2:]
    assert row.startswith("| 0 | 15,568, 10,960; 10,832, 10,832 | 5.5")
    assert said.startswith("experts")
    assert (tmp_path / "chart.png").stat().st_size > 10_000


@pytest.mark.slow
def test_the_steps_of_experts_and_of_the_dense_model_take_turns(monkeypatch, capsys):
    """One layer in place of four, and one round after those that warm up."""
    small = dataclasses.replace(experts_step.DENSE, num_layers=1, embed_dim=32, mlp_dim=64, num_heads=2, num_kv_heads=2)
    monkeypatch.setattr(experts_step, "DENSE", small)
    assert experts_step.main(["--rounds=1", "--batch-size=2", "--sequence-length=32"]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first.endswith(", 64 tokens a step")
    assert re.match(
        r"8 experts, top 2 / dense of the active size: \d+\.\d\d \((within|above) the goal of 1\.5\)", second
    )
