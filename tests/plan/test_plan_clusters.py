"""Names of clusters, and the devices behind them."""

import importlib.metadata
import os
import subprocess
import sys

import jax
import pytest

from meshtrain.errors import UserError
from meshtrain.hardware import accelerators
from meshtrain.plan.cluster import clusters


@pytest.mark.parametrize(
    ("text", "name", "sizes", "num_slices"),
    [
        ("h100:8x8", "h100", (8, 8), 1),
        ("A100:16x8", "a100", (16, 8), 1),
        ("h200:4", "h200", (1, 4), 1),
        ("v5e:16x16", "v5e", (16, 16), 1),
        ("v5p:8x8x8", "v5p", (8, 8, 8), 1),
        ("2xv5e:16x16", "v5e", (16, 16), 2),
        ("cpu:8", "cpu", (8,), 1),
    ],
)
def test_names_of_clusters(text, name, sizes, num_slices):
    assert clusters.parse(text) == (name, sizes, num_slices)


@pytest.mark.parametrize(("text", "fix"), [("2xh100:4x8", "h100:8x8"), ("3xcpu:2", "cpu:6")])
def test_slices_are_of_tpus(text, fix):
    with pytest.raises(UserError, match=f"nearest: {fix}$"):
        clusters.parse(text)


def test_cpus_are_simulated():
    cluster = clusters.open_cluster("cpu:8")
    assert cluster.devices == jax.devices()
    assert (cluster.platform, cluster.accelerator) == ("cpu", None)


@pytest.mark.parametrize(("text", "extra"), [("h100:1x8", "plan-gpu"), ("v5e:2x4", "plan-tpu")])
def test_a_missing_compiler_is_one_line_what_to_install(text, extra, monkeypatch):
    monkeypatch.setattr(clusters.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(clusters.importlib.metadata, "version", _not_installed)
    monkeypatch.setattr(clusters, "OLDEST_JAX", (0, 10))
    with pytest.raises(UserError, match=rf"pip install 'meshtrain\[{extra}\]'") as error:
        clusters.open_cluster(text)
    assert len(error.value.problems) == 1


def _not_installed(name):
    raise importlib.metadata.PackageNotFoundError(name)


def test_a_compiler_of_another_version_is_one_line(monkeypatch):
    monkeypatch.setattr(clusters.importlib.metadata, "version", lambda name: "0.1")
    monkeypatch.setattr(clusters, "OLDEST_JAX", (0, 10))
    with pytest.raises(UserError, match=rf"pip install jax-cuda12-pjrt=={jax.__version__}"):
        clusters.open_cluster("h100:1x8")


def test_an_older_jax_is_one_line(monkeypatch):
    monkeypatch.setattr(jax, "__version__", "0.10.2")
    monkeypatch.setattr(jax, "__version_info__", (0, 10, 2))
    said = "'h100:1x8' with jax 0.10.2; allowed: jax 0.12 or newer, .*; nearest: PYTHON=python3.12 scripts/plan$"
    with pytest.raises(UserError, match=said):
        clusters.open_cluster("h100:1x8")


@pytest.mark.parametrize("name", clusters.GPUS)
def test_each_gpu_s_file_agrees_with_the_table_of_accelerators(name):
    lines = (clusters.TARGETS / f"{name}.txtpb").read_text().splitlines()
    entries = dict(line.strip().split(": ", 1) for line in lines if ": " in line and not line.startswith("#"))
    accelerator = accelerators.find(entries["device_description_str"].strip('"'))
    assert accelerator is not None
    assert int(entries["device_memory_size"]) == accelerator.memory_bytes
    assert int(entries["memory_bandwidth"]) == pytest.approx(accelerator.memory_bytes_per_second, rel=0.001)


@pytest.mark.gpu_compiler
@pytest.mark.parametrize("name", clusters.GPUS)
def test_gpus_come_host_by_host(name):
    cluster = clusters.open_cluster(f"{name}:2x8")
    assert [device.process_index for device in cluster.devices] == [0] * 8 + [1] * 8
    assert cluster.accelerator is not None
    assert cluster.num_hosts == 2
    assert cluster.compute_capability == {"a100": (8, 0), "h100": (9, 0), "h200": (9, 0), "b200": (10, 0)}[name]


@pytest.mark.gpu_compiler
def test_a_process_that_has_used_jax_finds_gpus_as_well():
    """JAX has then looked for a GPU of this machine, and the compiler of GPUs has given up."""
    program = "import jax; jax.devices(); from meshtrain.plan.cluster.clusters import open_cluster; "
    program += "print(open_cluster('h100:2x8'))"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("JAX_")}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment, check=False)
    assert "num_hosts=2" in done.stdout, done.stderr


@pytest.mark.gpu_compiler
@pytest.mark.parametrize(("text", "name"), [("v5e:2x4", "v5e"), ("v5p:2x2x2", "v5p"), ("v6e:2x4", "v6e")])
def test_tpus_are_found_by_name(text, name):
    cluster = clusters.open_cluster(text)
    assert len(cluster.devices) == 8
    assert cluster.accelerator is not None
    assert cluster.accelerator.name == name


@pytest.mark.gpu_compiler
def test_a_torus_that_no_tpu_has_is_refused_in_one_line():
    with pytest.raises(UserError, match="which the compiler rejects"):
        clusters.open_cluster("v5e:3x5")
