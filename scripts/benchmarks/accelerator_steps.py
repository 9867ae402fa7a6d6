"""For `accelerator`: the measurements of its steps. A step runs in a separate process, on the first device.

Models are from configs/, reduced so that they fit one card of 80 GB and plain JAX computes the same numbers.
"""

import json
import platform
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from meshtrain.assembly.assemble import Assembly, assemble
from meshtrain.checkpoint.checkpoint import leaves_by_path
from meshtrain.checkpoint.integrity import is_sealed
from meshtrain.config.resolve import parse
from meshtrain.config.schema import Config
from meshtrain.files import JsonObject
from meshtrain.hardware.accelerators import find, peak_flops_per_second
from meshtrain.launch import distributed
from meshtrain.models.moe import grouped_matmul
from meshtrain.plan.__main__ import main as plan_of
from meshtrain.probe import bench_collectives
from meshtrain.sharding.rules import AXES
from meshtrain.step.precision import compute_name
from meshtrain.step.step import with_sequence_index
from scripts.benchmarks.step import plain_step

ROOT = Path(__file__).parents[2]
PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "meshtrain")
# Implementations of attention, with the platform that supports each; '': all platforms.
KERNELS = {"xla": "", "cudnn": "gpu", "triton": "gpu", "blockwise": "", "splash": "tpu"}
NO_GRADIENT = "key_bias"  # a softmax does not change if all its scores change equally
ONE = ["--config.mesh.data=1", "--config.mesh.fsdp=1", "--config.observe.tensorboard=no"]
GPT_LARGE, LLAMA_LARGE = "gpt2_124m of 65,536 tokens a step", "llama_1b of 16,384 tokens a step"
LONG, MIXTURE, FP8 = "llama_1b of 8,192 tokens", "qwen3_30b_a3b of 3 layers", "llama_1b in fp8"
CUT_MIXTURE = "qwen3_30b_a3b of 3 layers and 1/16 of the vocabulary"
UNROLLED = ["--config.remat.policy=none", "--config.remat.unroll=yes"]
GPT = ["--config=configs/gpt2_124m.py", *ONE, "--config.accumulation_steps=1"]
# Plain JAX writes all scores of attention, its Llama has an untied head, and it recomputes nothing.
LLAMA = [
    "--config=configs/llama_1b.py", *ONE, *UNROLLED, "--config.sequence_length=2048",
    "--config.accumulation_steps=1", "--config.model.tied_embeddings=no",
    "--config.model.rope.base=10000", "--config.model.rope.factor=1",
]  # fmt: skip
MODELS = {
    "gpt2_124m": [*GPT, "--config.batch_size=16"],
    # The batch of llm.c on one of its eight cards.
    GPT_LARGE: [*GPT, "--config.batch_size=64"],
    "llama_1b": [*LLAMA, "--config.batch_size=2"],
    # With 4,096 tokens a step, the optimizer takes a fifth of the step.
    LLAMA_LARGE: [*LLAMA, "--config.batch_size=8"],
    # The share of one of the configuration's eight devices; plain JAX needs too much memory for it.
    LONG: ["--config=configs/llama_1b.py", *ONE, *UNROLLED, "--config.batch_size=8"],
    # All 128 experts of each layer, with 2,048 rows for each expert.
    MIXTURE: [
        "--config=configs/qwen3_30b_a3b.py", *ONE, *UNROLLED, "--config.mesh.expert=1", "--config.batch_size=8",
        "--config.model.num_layers=3",
    ],
}  # fmt: skip
# 3 of 48 layers with the complete vocabulary spend 40 % of the time in the head, so this model has 3 / 48 of both.
MODELS[CUT_MIXTURE] = [*MODELS[MIXTURE], "--config.model.vocab_size=9496"]
MODELS[FP8] = [*MODELS["llama_1b"], "--config.precision.policy=fp8"]
TINY = [
    *(f"--config.model.{name}={size}" for name, size in (("num_layers", 1), ("embed_dim", 64), ("mlp_dim", 128))),
    *(f"--config.model.{name}=2" for name in ("num_heads", "num_kv_heads")),
    *("--config.model.vocab_size=512", "--config.batch_size=4", "--config.sequence_length=64"),
]  # fmt: skip
RUN = ["--config.log_every=1", "--config.num_eval_batches=1", "--config.sample_tokens=0", "--config.eval_every=0"]
DETERMINISTIC = "--config.precision.deterministic=yes"
SAVED_STEP = 50  # of the killed run
MAX_SECONDS = 600  # of one command


def words_of(model: str, tiny: bool) -> list[str]:
    """Returns the command line of a model."""
    return [*MODELS[model], *(TINY if tiny else ())]


def versions(tiny: bool, before: Mapping[str, Any]) -> JsonObject:
    """Returns the environment of the measurements: packages, driver, devices and their connections."""
    devices, _ = distributed.start(None)
    found: JsonObject = {name: metadata.version(name) for name in PACKAGES}
    stats = devices[0].memory_stats() or {}
    return found | {
        "python": platform.python_version(),
        "device": devices[0].device_kind,
        "num_devices": len(devices),
        "memory_bytes": stats.get("bytes_limit"),
        "driver": _said("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").partition("\n")[0],
        "links": _said("nvidia-smi", "topo", "-m"),
    }


def _said(*words: str) -> str:
    """Returns the output of a program; '' if it is not installed."""
    try:
        return subprocess.run(words, capture_output=True, text=True, timeout=60, check=False).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return ""


def attention(kernel: str, tiny: bool) -> JsonObject:
    """Returns the differences of a kernel's loss and gradients from `xla`, with one document per sequence and two.

    `xla` itself is compared with float32; this difference is the scale for judging the other kernels.
    """
    distributed.start(None)
    if KERNELS[kernel] not in ("", jax.default_backend()):
        return {"not_measured": f"a kernel for {KERNELS[kernel].upper()}s"}
    own = "--config.precision.policy=float32" if kernel == "xla" else f"--config.model.attention={kernel}"
    return {
        name: _difference([*_short(tiny), f"--config.model.within_documents={packed}"], own)
        for name, packed in (("whole", "no"), ("packed", "yes"))
    }


def fp8(tiny: bool, before: Mapping[str, Any]) -> JsonObject:
    """Returns the differences of loss and gradients between 8-bit operands and bfloat16."""
    return _difference(_short(tiny), "--config.precision.policy=fp8")


def experts(tiny: bool, before: Mapping[str, Any]) -> JsonObject:
    """Returns the differences of loss and gradients between the experts' kernels and a loop over blocks of rows."""
    words = [
        *words_of(MIXTURE, tiny),
        "--config.model.num_layers=1",
        f"--config.model.moe.num_experts={8 if tiny else 32}",
    ]
    if not tiny:
        words.append("--config.batch_size=1")
    _, wanted, state, batch = opened(words)
    found = _gradients(wanted, state.params, batch)
    with mock.patch.object(grouped_matmul, "kernel_for", return_value="loop"):
        return _apart(_gradients(wanted, state.params, batch), found)


def _short(tiny: bool) -> list[str]:
    """Returns GPT-2 with two layers, so that the differences come from kernels, not from depth."""
    words = [*words_of("gpt2_124m", tiny), "--config.model.attention=xla"]
    return words if tiny else [*words, "--config.model.num_layers=2", "--config.batch_size=4"]


def _difference(words: Sequence[str], own: str) -> JsonObject:
    """Returns how one more argument changes the loss (relative) and a gradient (largest change / norm)."""
    _, wanted, state, batch = opened(words)
    other, _ = parse([*words, own], reads_data=False)
    changed = assemble(other, dict.fromkeys(AXES, 1), list(wanted.mesh.devices.flat))
    return _apart(*(_gradients(one, state.params, batch) for one in (wanted, changed)))


def _apart(wanted: tuple[float, dict[str, np.ndarray]], changed: tuple[float, dict[str, np.ndarray]]) -> JsonObject:
    (loss, theirs), (new_loss, ours) = wanted, changed
    return {
        "loss": abs(new_loss - loss) / loss,
        "gradients": max(
            _norm(ours[path] - leaf) / _norm(leaf) for path, leaf in theirs.items() if not path.endswith(NO_GRADIENT)
        ),
    }


def _norm(x: np.ndarray) -> float:
    return float(np.linalg.norm(x.astype(np.float64)))


def _gradients(assembly: Assembly, params: Any, batch: Any) -> tuple[float, dict[str, np.ndarray]]:
    """Returns the mean loss of a batch, and its gradients by path, on the host."""

    def mean(params: Any) -> jax.Array:
        total, weight, _ = assembly.task.loss(params, with_sequence_index(batch), jax.random.key(0), True)
        return total / weight

    loss, found = jax.device_get(jax.jit(jax.value_and_grad(mean))(params))
    return float(loss), leaves_by_path(found)


def opened(words: Sequence[str]) -> tuple[Config, Assembly, Any, dict[str, Any]]:
    """Returns the configuration, the assembly on one device, its first state, and a batch of random tokens."""
    config, _ = parse(list(words), reads_data=False)
    [device, *_], _ = distributed.start(1)
    assembly = assemble(config, dict.fromkeys(AXES, 1), [device])
    state = assembly.steps.init(jax.random.key_data(jax.random.key(0)))
    return config, assembly, state, jax.device_put(batch_of(config), device)


def batch_of(config: Config) -> dict[str, np.ndarray]:
    """Returns a batch [B, T] of random tokens; two documents per sequence if the model distinguishes them."""
    shape = (config.batch_size, config.sequence_length)
    tokens = np.random.default_rng(0).integers(0, config.model.vocab_size, (shape[0], shape[1] + 1), np.int32)
    place, start = np.arange(shape[1]), shape[1] // 3 if config.model.within_documents else 0
    return {
        "tokens": tokens[:, :-1],
        "targets": tokens[:, 1:],
        "segment_ids": np.broadcast_to(1 + (place >= start), shape).astype(np.int32),
        "positions": np.broadcast_to(np.where(place < start, place, place - start), shape).astype(np.int32),
        "weights": np.ones(shape, np.float32),
    }


def speed(model: str, tiny: bool) -> JsonObject:
    """Returns tokens per second, MFU and memory of meshtrain's step."""
    config, assembly, state, batch = opened(words_of(model, tiny))
    step = assembly.steps.train.lower(state, batch).compile()
    found = _timed(step, state, batch, lambda result: result["loss"])
    device = assembly.mesh.devices.flat[0]
    peak = peak_flops_per_second(device.device_kind, compute_name(config.precision))
    flops = assembly.task.flops_per_token * found["tokens_per_second"]
    return found | {"mfu": flops / peak if peak else None, "compiler_bytes": _peak(step)}


def bare(model: str, tiny: bool) -> JsonObject:
    """Returns the same values for plain JAX's step (`plain_decoder.py`) with the same weights, batch and optimizer."""
    config, assembly, state, batch = opened(words_of(model, tiny))
    transformation, step = plain_step(config)
    params = jax.tree.map(jnp.copy, state.params)
    del state, assembly
    plain = params, jax.jit(transformation.init)(params)
    compiled = jax.jit(step, donate_argnums=0).lower(plain, batch).compile()
    return _timed(compiled, plain, batch, lambda result: result) | {"compiler_bytes": _peak(compiled)}


def _timed(step: Any, state: Any, batch: Any, loss_of: Callable[[Any], Any], num_steps: int = 10) -> dict[str, Any]:
    seconds, losses = [], []
    for _ in range(3 + num_steps):
        start = time.perf_counter()
        state, result = step(state, batch)
        losses.append(float(loss_of(result)))  # waits for the step
        seconds.append(time.perf_counter() - start)
    stats = batch["tokens"].devices().pop().memory_stats() or {}
    median = statistics.median(seconds[3:])
    return {
        "step_seconds": median,
        "tokens_per_second": batch["tokens"].size / median,
        "first_loss": losses[0],
        "last_loss": losses[-1],
        "peak_bytes": stats.get("peak_bytes_in_use"),
    }


def _peak(compiled: Any) -> int:
    """Returns a device's bytes by the compiler's account: arguments, results that are not donated, and temporaries."""
    found = compiled.memory_analysis()
    new = found.output_size_in_bytes - found.alias_size_in_bytes
    return int(found.argument_size_in_bytes + new + found.temp_size_in_bytes)


def planned(model: str, tiny: bool, before: Mapping[str, Any]) -> JsonObject:
    """Returns the plan of a model's step for this kind of device, with its time fitted to the measured time."""
    kind = before["versions"]["device"]
    accelerator = find(kind)
    if accelerator is None and kind != "cpu":
        raise RuntimeError(f"{kind}: the plan does not know this device; meshtrain/hardware/accelerators.py lists them")
    words = [f"--cluster={accelerator.name}:1x1" if accelerator else "--cluster=cpu:1", *words_of(model, tiny)]
    if accelerator:
        words.append(f"--calibrate={before[model]['step_seconds']}")
    with tempfile.TemporaryDirectory() as folder:
        plan_of([*words, f"--json={folder}/plan.json"])
        plan = json.loads(Path(folder, "plan.json").read_text())
    return {"peak_bytes": plan["memory"]["peak_bytes"], "factor": plan["modelled"]["calibration_factor"]}


def collectives(tiny: bool, before: Mapping[str, Any]) -> JsonObject:
    """Returns the fitted GB/s and latency of each collective between all devices, and the collectives without a fit."""
    num_devices = 2 if tiny else before["versions"]["num_devices"]
    if num_devices == 1:
        return {"not_measured": "one device"}
    words = [f"--config.mesh.data={num_devices}", "--largest=64K" if tiny else "--largest=256M"]
    with tempfile.TemporaryDirectory() as folder:
        bench_collectives.main([*words, f"--json={folder}/links.json"])
        found = json.loads(Path(folder, "links.json").read_text())
    fitted: JsonObject = {
        one["operation"]: {"GB/s": one["bytes_per_second"] / 1e9, "us": 1e6 * one["latency_seconds"]}
        for one in found["links"]
    }
    return fitted | {"not_fitted": " and ".join(one["operation"] for one in found["not_fitted"])}


def performed(words: Sequence[str]) -> str:
    """Runs `python -m` with these arguments, and returns its output.

    Raises:
      RuntimeError: it failed; the message is its last line.
    """
    command = [sys.executable, "-m", *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=MAX_SECONDS, check=False)
    if done.returncode:
        raise RuntimeError(f"{words[0]} {words[1]} ended with {done.returncode}: {last_line(done.stderr)}")
    return done.stdout


def last_line(text: str) -> str:
    """Returns the last line that names an error (C++ locations may follow it), else the last line with text."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"[\w.]*(Error|Exception): ", line)]
    return [*errors[-1:], *lines[-1:], ""][0]


def bits(deterministic: bool, tiny: bool) -> JsonObject:
    """Returns whether two runs, each in a separate process, end with the same bits, and the seconds of a step."""
    words = [*words_of("gpt2_124m", tiny), *RUN, "--config.num_steps=6"]
    if deterministic:
        words.append(DETERMINISTIC)
    with tempfile.TemporaryDirectory() as folder:
        runs = [Path(folder, name) for name in ("first", "second")]
        for run in runs:
            performed(["scripts.benchmarks.witness", *words, f"--workdir={run}"])
        first, second = (_saved(run) for run in runs)
        losses = [[row["loss"] for row in rows(run) if "loss" in row] for run in runs]
        seconds = statistics.median(row["step_seconds"] for row in rows(runs[1]) if row.get("step_seconds"))
    different = sum(first[path] != second[path] for path in first)
    same = losses[0] == losses[1]
    return {"arrays": len(first), "different": different, "same_losses": same, "step_seconds": seconds}


def _saved(run: Path) -> dict[str, Any]:
    """Returns path -> hashes of the arrays in a run's last save, see witness.py."""
    saved = json.loads((run / "seen.0.json").read_text())["saved"]
    found: dict[str, Any] = saved[max(saved, key=int)]
    return found


def rows(run: Path) -> list[dict[str, Any]]:
    """Returns the rows of a run's log."""
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def killed(tiny: bool, before: Mapping[str, Any]) -> JsonObject:
    """Returns the step at which a killed run resumed, and the differences of its losses from an uninterrupted run."""
    # The steps after the first checkpoint must take longer than computing its checksums.
    words = [*words_of("gpt2_124m", tiny), *RUN, f"--config.num_steps={600 if tiny else 150}", DETERMINISTIC]
    words = ["meshtrain", "train", *words, f"--config.checkpoint.every={SAVED_STEP}", "--config.checkpoint.keep_last=1"]
    with tempfile.TemporaryDirectory() as folder:
        whole, cut = Path(folder, "whole"), Path(folder, "cut")
        performed([*words, f"--workdir={whole}"])
        _kill([*words, f"--workdir={cut}"], cut)
        said = performed([*words, f"--workdir={cut}"])
        losses = [{row["step"]: row["loss"] for row in rows(run) if "loss" in row} for run in (whole, cut)]
    [kept] = map(int, re.findall(r"^(?:init|restore) .* step (\d+)$", said, re.MULTILINE))
    after = [step for step in losses[0] if step > kept]
    return {"resumed_at": kept, "difference": max(abs(losses[1][step] / losses[0][step] - 1) for step in after)}


def _kill(words: Sequence[str], run: Path) -> None:
    """Starts a run and kills it, SIGKILL, once its first checkpoint is sealed."""
    command = [sys.executable, "-m", *words]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        deadline = time.monotonic() + MAX_SECONDS
        while process.poll() is None and not is_sealed(run / "checkpoints" / str(SAVED_STEP)):
            if time.monotonic() > deadline:
                break
            time.sleep(0.02)
        process.send_signal(signal.SIGKILL)
    if process.returncode != -signal.SIGKILL:
        raise RuntimeError(f"the run ended with {process.returncode} before it was killed")
