"""A scaling from programs that the GPU's compiler made: one between two others is what compiling it says."""

import dataclasses
import math

import pytest

from meshtrain.launch.hardware import usable_bytes
from meshtrain.plan import guess, prices, sample, topology, ways
from meshtrain.plan.curves import COMPILED, MODELLED
from meshtrain.plan.timing import Assumptions
from meshtrain.plan.ways import STRONG
from meshtrain.step.precision import PrecisionOptions
from tests.plan.conftest import config as small

pytestmark = pytest.mark.gpu_compiler

SIZES = (4, 16, 64)


def test_a_step_between_two_compiled_ones_is_what_compiling_it_says():
    """From 16 microbatches on 4 GPUs of one host and one of 64 on eight hosts: those of 16 GPUs."""
    model = dataclasses.replace(small().model, embed_dim=512, mlp_dim=2048)
    options = {"batch_size": 256, "sequence_length": 256, "model": model, "precision": PrecisionOptions("bfloat16")}
    config = small({"fsdp": 16}, accumulation_steps=8, **options)
    clusters = {size: topology.open_cluster(f"h100:{math.ceil(size / 8)}x{min(size, 8)}") for size in SIZES}
    capacity = usable_bytes(clusters[16].accelerator)
    basis = ways.Basis(config, 16, guess.weights_of(config), capacity, devices_each=8)
    way = ways.Way("fsdp", "fsdp", (), (), 2)
    line = [ways.point(basis, way, STRONG, size) for size in SIZES]
    assert [point.num_microbatches for point in line] == [32, 8, 2]
    made = prices.Prices(basis, clusters, Assumptions(), sample.compile_point)
    made.compile(prices.ends(line), 2)
    modelled = made.rows(line)
    made.compile(line, 1)
    compiled = made.rows(line)
    assert [row.how for row in modelled] == [COMPILED, MODELLED, COMPILED]
    assert [row.how for row in compiled] == [COMPILED] * 3
    assert modelled[1].seconds == pytest.approx(compiled[1].seconds, rel=0.05)
    assert modelled[1].peak_bytes == pytest.approx(compiled[1].peak_bytes, rel=0.05)
