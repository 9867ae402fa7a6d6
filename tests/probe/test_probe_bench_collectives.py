"""`meshtrain bench-collectives` from its command line: wrong input, exit codes, one process and several."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

from meshtrain.hardware.links import OPERATIONS
from meshtrain.probe import bench_collectives, job_mesh
from meshtrain.probe.bench import benchmark
from meshtrain.probe.bench.sweep import Sweep
from meshtrain.probe.bench.timed import Timed

ROOT = pathlib.Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("overrides", "config", "sizes"),
    [
        ({}, None, (-1, 1, 1, 1)),
        ({"mesh.fsdp": "4"}, None, (1, 1, 4, 1)),
        ({}, "configs/3d.py", (2, 2, 1, 2)),
        ({"mesh.tensor": "3", "batch_size": "7"}, "configs/3d.py", (2, 2, 1, 3)),  # the batch need not divide
    ],
)
def test_the_mesh_is_that_of_the_configuration(overrides, config, sizes):
    given = bench_collectives.argparse.Namespace(overrides=overrides, config=config and str(ROOT / config))
    made = job_mesh.build_config(given).mesh
    assert (made.data, made.pipeline, made.fsdp, made.tensor) == sizes


@pytest.mark.parametrize(("wrong", "code"), [((), 0), (("process 0: ...",), 1)])
def test_a_wrong_value_is_an_exit_code(wrong, code, monkeypatch, capsys):
    row = Timed("data", "all-reduce", 8, 1024, (1e-3,), wrong)
    monkeypatch.setattr(benchmark, "sweep", lambda *_, **__: Sweep("cpu", {"data": 8}, 1, 1, (1024,), (row,), ()))
    assert bench_collectives.main([]) == code
    assert ("WRONG" in capsys.readouterr().out) == bool(code)


def test_it_measures_prints_and_writes(tmp_path, capsys):
    file, picture = tmp_path / "links.json", tmp_path / "chart.png"
    words = ["--config.mesh.data=2", "--smallest=64", "--largest=255", f"--json={file}", f"--out={picture}"]
    assert bench_collectives.main(words) == 0
    said = capsys.readouterr().out
    assert "mesh         data 2: 2 x cpu" in said
    assert "sizes        64 B to 64 B\n" in said
    assert said.count(" right\n") == len(OPERATIONS)
    content = json.loads(file.read_text())
    assert [row["operation"] for row in content["measurements"]] == list(OPERATIONS)
    assert (content["platform"], content["links"]) == ("cpu", [])
    assert content["not_fitted"][0]["why_not"]
    assert picture.stat().st_size > 0


@pytest.mark.slow
def test_two_processes_measure_together_and_one_prints(tmp_path):
    file = tmp_path / "links.json"
    words = ["--config.mesh.data=2", "--config.mesh.fsdp=4", "--smallest=1K", "--largest=1K", f"--json={file}"]
    launch = [sys.executable, "-m", "meshtrain", "launch", "--processes=2", "--devices=4", "--", "-m", "meshtrain"]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_COMPILATION_CACHE_DIR": str(tmp_path / "cache")}
    done = subprocess.run(
        [*launch, "bench-collectives", *words], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=400
    )
    assert done.returncode == 0, done.stderr
    content = json.loads(file.read_text())
    assert (content["num_processes"], content["num_hosts"]) == (2, 1)
    measured = [(row["axis"], row["operation"], row["wrong"]) for row in content["measurements"]]
    assert measured == [(axis, operation, []) for axis in ("data", "fsdp") for operation in OPERATIONS]
    assert done.stdout.count("all-to-all") >= 2
    assert all(line.startswith("[0]") for line in done.stdout.splitlines() if "all-to-all" in line), done.stdout
