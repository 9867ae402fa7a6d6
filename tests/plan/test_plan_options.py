"""Training and planning compile with the same options."""

import dataclasses
import importlib
import math
import pathlib
import re
import subprocess
import sys

import jax
import pytest

from meshtrain.assembly.assemble import assemble
from meshtrain.config.schema import Config
from meshtrain.hardware import compiler_options
from meshtrain.models.decoder_options import MoeOptions
from meshtrain.models.transformer.decoder import DecoderOptions
from meshtrain.plan.cluster import compile as compiling
from meshtrain.sharding.rules import AXES
from meshtrain.step.precision import PrecisionOptions

ROOT = pathlib.Path(__file__).parents[2]
LIMIT, SLOP = "xla_gpu_experimental_parallel_collective_overlap_limit", "xla_gpu_memory_limit_slop_factor"


@pytest.fixture
def newest(monkeypatch):
    """The options are those for the newest JAX, whatever is installed."""
    monkeypatch.setattr(compiler_options.importlib.metadata, "version", lambda name: "0.12.0.1")


def values_of(kind, layer_bytes=0, **when):
    return {option.name: option.value for option in compiler_options.options_of(kind, layer_bytes, **when)}


@pytest.mark.parametrize("options", [compiler_options.GPU_OPTIONS, compiler_options.CPU_OPTIONS])
def test_options_have_typed_values_and_reasons(options):
    assert options
    assert all(option.reason and not isinstance(option.value, str) for option in options)
    assert len({option.name for option in options}) == len(options)


@pytest.mark.skipif(not compiler_options.options_of("cpu"), reason="the option is left out on this jaxlib")
def test_a_step_on_cpus_copies_no_moments():
    """The guard keeps the old ones at hand; without the option each is copied before it is overwritten."""
    model = DecoderOptions(num_layers=2, embed_dim=32, mlp_dim=64, vocab_size=257)
    config = Config(batch_size=4, sequence_length=16, model=model)
    assembly = assemble(config, dict.fromkeys(AXES, 1), jax.devices()[:1])
    text = assembly.steps.train.lower(assembly.state, assembly.batch).compile().as_text()
    assert "mu__layers____mlp____up" in text
    assert not re.search(r" copy\(%state_opt_state\S*(mu|nu)__", text)


@pytest.mark.parametrize(("version", "on_gpus", "on_cpus"), [("0.10.2", 7, 1), ("0.12.0.1", 11, 1), ("0.13", 11, 0)])
def test_options_that_other_compilers_refuse_are_left_out(monkeypatch, version, on_gpus, on_cpus):
    monkeypatch.setattr(compiler_options.importlib.metadata, "version", lambda name: version)
    everything = {"is_late": True, "by_chunk": True, "splits_experts": True, "is_deterministic": True}
    given = values_of("NVIDIA H100 80GB HBM3", 2 * compiler_options.LARGE_BYTES, **everything)
    assert len(given) == on_gpus
    assert any("pipeline" in name or "sol_latency" in name for name in given) == (version != "0.10.2")
    assert len(compiler_options.options_of("cpu", **everything)) == on_cpus
    assert compiler_options.options_of("TPU v5", **everything) == ()


def test_what_a_large_layer_sends_is_joined_on_gpus(newest):
    large, small = 2 * compiler_options.JOINED_BYTES, compiler_options.JOINED_BYTES
    added = values_of("NVIDIA H200", large).items() - values_of("NVIDIA H200").items()
    assert added == {(f"xla_gpu_{kind}_combine_threshold_bytes", large) for kind in ("all_reduce", "reduce_scatter")}
    assert values_of("NVIDIA H200", small) == values_of("NVIDIA H200")
    assert values_of("cpu", large) == values_of("cpu")
    assert values_of("TPU v5", large) == {}


def test_what_is_reduced_beside_other_work_lifts_the_limit_on_gpus(newest):
    late = values_of("NVIDIA H200", is_late=True)
    assert late[LIMIT] == 64
    without, given = (values_of("NVIDIA H200", by_chunk=each) for each in (False, True))
    assert given == without | {LIMIT: 64, SLOP: 200}
    assert values_of("cpu", by_chunk=True) == values_of("cpu")


def test_the_loops_of_large_layers_are_pipelined(newest):
    def pipelined(layer_bytes, **given):
        names = values_of("NVIDIA H200", layer_bytes, **given)
        return [name for name in names if name.startswith("xla_gpu_pipeline_")]

    assert pipelined(compiler_options.LARGE_BYTES) == []
    assert len(pipelined(compiler_options.LARGE_BYTES + 1)) == 3
    # Gathers are not moved where they would repeat a sum.
    late = pipelined(compiler_options.LARGE_BYTES + 1, gathers_early=False)
    assert late == [name for name in pipelined(compiler_options.LARGE_BYTES + 1) if "gather" not in name]
    assert len(late) == 2


def test_loops_that_exchange_tokens_have_options_of_their_own(newest):
    dense, experts = values_of("NVIDIA H200"), values_of("NVIDIA H200", splits_experts=True)
    assert dense.items() <= experts.items()
    assert len(experts) - len(dense) == 5
    late = values_of("NVIDIA H200", splits_experts=True, gathers_early=False)
    assert experts.keys() - late.keys() == {compiler_options.PIPELINED_GATHERS}
    large = values_of("NVIDIA H200", compiler_options.LARGE_BYTES + 1, splits_experts=True)
    assert experts.items() <= large.items()


def test_the_same_bits_each_time_are_options_of_gpus():
    kinds = ("NVIDIA H200", "cpu", "TPU v5")
    added = [values_of(kind, is_deterministic=True).items() - values_of(kind).items() for kind in kinds]
    assert added == [{("xla_gpu_deterministic_ops", True), ("xla_gpu_enable_triton_gemm", False)}, set(), set()]


@pytest.mark.parametrize(
    ("sizes", "num_experts", "of_loops", "of_rows"),
    [
        ({"expert": 2}, 4, True, False),
        ({"fsdp": 2}, 4, False, False),
        ({"expert": 2}, 0, False, False),
        ({"expert": 2, "pipeline": 2}, 4, False, True),
        ({"fsdp": 2, "pipeline": 2}, 4, False, False),
        ({"expert": 2, "pipeline": 2}, 0, False, False),
    ],
)
def test_options_of_split_experts_are_given_only_where_there_are_some(
    monkeypatch, sizes, num_experts, of_loops, of_rows
):
    """Without experts the axis splits the batch and the storage of weights."""
    given = []
    module = importlib.import_module("meshtrain.assembly.compiling")  # whatever the package calls so
    asked = ("splits_experts", "by_chunk", "is_deterministic")
    monkeypatch.setattr(module, "options_of", lambda *_, **named: given.append([named[one] for one in asked]) or ())
    model = DecoderOptions(num_layers=2, embed_dim=32, num_heads=4, vocab_size=257, mlp_dim=16)
    model = dataclasses.replace(model, moe=MoeOptions(num_experts=num_experts, expert_dim=16))
    precision = PrecisionOptions(deterministic=of_loops)
    config = Config(batch_size=8, sequence_length=16, model=model, precision=precision)
    assemble(config, dict.fromkeys(AXES, 1) | sizes, jax.devices()[: math.prod(sizes.values())])
    assert given == [[of_loops, of_rows, of_loops]]


NOISE = """
import os, time
from meshtrain.hardware.compiler_options import capture_stderr
with capture_stderr() as lines:
    os.write(2, b"I1121 nothing of interest\\n")
    if WHAT:
        os.write(2, WHAT)
        time.sleep(0.5)
        os._exit(134)
print(lines)
"""


@pytest.mark.parametrize(
    ("what", "printed", "errors"),
    [
        (b"", "['I1121 nothing of interest']\n", ""),
        (b"F1121 shape.h:847] Check failed\n    @ there\n", "", "F1121 shape.h:847] Check failed\n    @ there\n"),
    ],
)
def test_what_a_compiler_says_is_kept_unless_it_is_its_last_word(what, printed, errors):
    code = NOISE.replace("WHAT", repr(what))
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == (printed, errors)


class Lowered:
    """A program whose first compilation the compiler refuses, as XLA words it."""

    def __init__(self, *refusals):
        self.refusals, self.asked = list(refusals), []

    def compile(self, compiler_options=None):
        self.asked.append(compiler_options)
        if self.refusals:
            raise jax.errors.JaxRuntimeError(self.refusals.pop(0))
        return "compiled"


NO_TILES = "INTERNAL: Couldn't find output tile sizes for fusion %gemm_fusion_dot.7"


def test_a_product_without_tiles_is_compiled_once_more_without_triton():
    added = {"xla_gpu_enable_triton_gemm": False}
    first, second = Lowered(), Lowered(NO_TILES)
    assert compiling.with_tiles(first) == ("compiled", {})
    assert compiling.with_tiles(second) == ("compiled", added)
    assert (first.asked, second.asked) == ([None], [None, added])


@pytest.mark.parametrize("refusals", [["RESOURCE_EXHAUSTED: out of memory"], [NO_TILES, NO_TILES]])
def test_other_refusals_and_a_second_one_are_raised(refusals):
    given = Lowered(*refusals)
    with pytest.raises(jax.errors.JaxRuntimeError, match=refusals[-1].split(":")[0]):
        compiling.with_tiles(given)
    assert len(given.asked) == len(refusals)
