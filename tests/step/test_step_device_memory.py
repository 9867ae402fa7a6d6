"""Bytes of training state on one device, at every ZeRO level and with fsdp, against what the shapes say."""

import jax
import pytest

from meshtrain import explain
from meshtrain.assembly.assemble import assemble
from meshtrain.cli.tables import format_bytes
from meshtrain.config.schema import Config
from meshtrain.lab.compression import CompressionOptions
from meshtrain.models.transformer.decoder import DecoderOptions
from meshtrain.sharding.offload import OffloadOptions
from meshtrain.sharding.param_sharding import ZeroOptions
from meshtrain.sharding.reduction import ReductionOptions
from meshtrain.sharding.rules import AXES
from meshtrain.step.device_memory import training_state_bytes

MODEL = DecoderOptions(num_layers=2, embed_dim=64, mlp_dim=128, num_heads=4, num_kv_heads=4, vocab_size=256)
NORMS = 5 * 64  # elements that fsdp does not split
# level: how many replicas share out (parameters, gradients, moments).
SHARED = {0: (0, 0, 0), 1: (0, 0, 1), 2: (0, 1, 1), 3: (1, 1, 1)}
SUM = ReductionOptions()
COUNTERS_BYTES = 16  # the optimizer's


def assembled(level, offload=False, reduction=SUM, **mesh):
    shape = dict.fromkeys(AXES, 1) | mesh
    offloaded = OffloadOptions(moments=offload)
    config = Config(
        batch_size=8, sequence_length=8, model=MODEL, zero=ZeroOptions(level), offload=offloaded,
        reduction=reduction,
    )  # fmt: skip
    return assemble(config, shape, jax.devices()[: shape["data"] * shape["fsdp"]])


@pytest.mark.parametrize("mesh", [{"data": 8}, {"data": 2, "fsdp": 4}, {"fsdp": 8}], ids=str)
@pytest.mark.parametrize("level", SHARED)
def test_each_level_splits_what_it_says(mesh, level):
    assembly = assembled(level, **mesh)
    sizes = {"data": 1, "fsdp": 1} | mesh
    piece = 4 * ((assembly.task.num_parameters - NORMS) // sizes["fsdp"] + NORMS)
    parameters, gradients, moments = (piece // sizes["data"] ** split for split in SHARED[level])
    found = training_state_bytes(assembly.state, assembly.states.sums)
    assert (found.parameters, found.gradients) == (parameters, gradients)
    assert 0 < found.moments - 2 * moments <= COUNTERS_BYTES
    assert found.on_host == 0


@pytest.mark.parametrize("level", [0, 1, 2])
def test_gradients_are_what_the_step_allocates_on_each_replica(level):
    assembly = assembled(level, data=8)
    replicas = assembly.placed.replicas
    sums = jax.eval_shape(lambda params: replicas.zeros(params, replicas.stored), assembly.state.params)
    allocated = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(sums))
    assert training_state_bytes(assembly.state, assembly.states.sums).gradients == allocated


def test_explain_prints_one_line_for_a_device():
    (line,) = [line for line in explain.text(assembled(2, data=8)).splitlines() if line.startswith("per device")]
    assert line == "per device   parameters 449 KiB, gradients 56.2 KiB, moments 112 KiB"


@pytest.mark.parametrize("mesh", [{"data": 8}, {"data": 2, "fsdp": 4}], ids=str)
def test_a_residual_takes_what_the_parameters_take(mesh):
    assembly = assembled(1, reduction=CompressionOptions("int8"), **mesh)
    found = training_state_bytes(assembly.state, assembly.states.sums)
    assert found.extra == found.parameters > 0
    assert found.total == found.parameters + found.gradients + found.moments + found.extra
    assert f"residual {format_bytes(found.extra)}" in explain.text(assembly)
    once = assembled(1, reduction=CompressionOptions("int8", feedback=False), **mesh)
    assert training_state_bytes(once.state, once.states.sums).extra == 0
    assert "extra" not in explain.text(once)


def test_moments_on_the_host_are_not_in_device_memory():
    moved, here = (
        training_state_bytes(one.state, one.states.sums) for one in (assembled(0, True, data=2), assembled(0, data=2))
    )
    assert (moved.parameters, moved.gradients) == (here.parameters, here.gradients)
    assert 0 < moved.moments <= COUNTERS_BYTES < moved.on_host
    assert moved.moments + moved.on_host == here.moments
