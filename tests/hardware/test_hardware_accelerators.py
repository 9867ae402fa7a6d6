"""The table of accelerators: found by JAX's names and by nothing that resembles them."""

import pathlib
import re

import pytest

from meshtrain.hardware import accelerators, compiler_options


@pytest.mark.parametrize(
    "device_kind, name",
    [
        ("NVIDIA A100-SXM4-80GB", "a100-80"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA B200", "b200"),
        ("TPU v4", "v4"),
        ("TPU v5 lite", "v5e"),
        ("TPU v5", "v5p"),
        ("TPU v5p", "v5p"),
        ("TPU v6 lite", "v6e"),
    ],
)
def test_known_devices_are_found(device_kind, name):
    accelerator = accelerators.find(device_kind)
    assert accelerator is not None
    assert accelerator.name == name


@pytest.mark.parametrize(
    "device_kind",
    [
        "cpu",
        "",
        "NVIDIA H100 PCIe",
        "NVIDIA GH200 480GB",
        "NVIDIA H100 80GB HBM3 MIG 1g.10gb",
        "NVIDIA GB200",
        "TPU v4 lite",
    ],
)
def test_devices_that_resemble_known_ones_have_no_peak(device_kind):
    assert accelerators.find(device_kind) is None
    assert accelerators.peak_flops_per_second(device_kind, "bfloat16") is None


def test_peaks_by_dtype():
    assert accelerators.peak_flops_per_second("NVIDIA A100-SXM4-80GB", "bfloat16") == 312e12
    assert accelerators.peak_flops_per_second("NVIDIA A100-SXM4-80GB", "float16") == 312e12
    assert accelerators.peak_flops_per_second("NVIDIA A100-SXM4-80GB", "float32") == 156e12
    assert accelerators.peak_flops_per_second("TPU v5", "bfloat16") == 459e12
    assert accelerators.peak_flops_per_second("TPU v5", "float32") is None
    assert accelerators.peak_flops_per_second("TPU v5", "float16") is None
    assert accelerators.peak_flops_per_second("NVIDIA H200", "float64") is None
    assert accelerators.peak_flops_per_second("NVIDIA H200", "fp8") == 1978.9e12
    assert accelerators.peak_flops_per_second("NVIDIA A100-SXM4-80GB", "fp8") is None


def test_every_device_has_one_entry_with_its_source():
    kinds = [kind for accelerator in accelerators.ACCELERATORS for kind in accelerator.device_kinds]
    assert len(set(kinds)) == len(kinds)
    assert all(accelerator.source for accelerator in accelerators.ACCELERATORS)


def test_units_agree():
    # A factor of 1000 (GB for bytes) or of 2 in the wrong place would leave these bounds.
    for accelerator in accelerators.ACCELERATORS:
        assert 100e12 < accelerator.bfloat16_flops_per_second < 3e15
        assert accelerator.float8_flops_per_second in (
            None,
            pytest.approx(2 * accelerator.bfloat16_flops_per_second, 1e-3),
        )
        assert 16e9 < accelerator.memory_bytes < 200e9
        assert 100 < accelerator.bfloat16_flops_per_second / accelerator.memory_bytes_per_second < 600
        assert 25e9 <= accelerator.link_bytes_per_second / accelerator.num_links <= 100e9
        assert accelerator.network_bytes_per_second is None or accelerator.network_bytes_per_second <= 50e9


def test_only_cpus_compile_the_initial_weights_with_less_optimization():
    assert compiler_options.init_compiler_options("cpu") == {"xla_backend_optimization_level": 1}
    assert (
        compiler_options.init_compiler_options("NVIDIA H200") == compiler_options.init_compiler_options("TPU v5") == {}
    )


def test_the_fraction_with_which_runs_start_holds_what_plans_assume_on_each_gpu():
    for one in accelerators.ACCELERATORS:
        if one.device_kinds[0].startswith("NVIDIA"):
            assert accelerators.usable_bytes(one) <= accelerators.POOL_FRACTION * one.memory_bytes
            assert one.memory_bytes * (1 - accelerators.POOL_FRACTION) > accelerators.GPU_RUNTIME_BYTES


@pytest.mark.parametrize(
    "name", ["Dockerfile", "scripts/slurm.sbatch", "scripts/kubernetes.yaml", "scripts/jobset.yaml"]
)
def test_jobs_and_the_image_set_the_fraction_that_plans_assume(name):
    text = (pathlib.Path(__file__).parents[2] / name).read_text()
    values = re.findall(rf"{accelerators.FRACTION_VARIABLE}\b[^\n]*?(?:=|:-|\n\s+value: \")([\d.]+)\b", text)
    assert values
    assert set(values) == {str(accelerators.POOL_FRACTION)}
    assert text.count("- name: " + accelerators.FRACTION_VARIABLE) == text.count("image: registry")  # in each container
