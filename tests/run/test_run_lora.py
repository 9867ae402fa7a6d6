"""A run with adapters: it starts from a base run, resumes on another mesh, and its weights generate and evaluate."""

import json
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshtrain import evaluate, generate
from meshtrain.checkpoint.checkpoint import CHECKPOINTS, Checkpoints
from meshtrain.checkpoint.other_runs import restore_params
from meshtrain.checkpoint.retention import CheckpointOptions
from meshtrain.config.schema import Config
from meshtrain.errors import UserError
from meshtrain.models.lora import LoraOptions
from meshtrain.run import base_weights
from meshtrain.sharding.trainable import is_adapter
from meshtrain.step.precision import PrecisionOptions
from tests.parity.runs import by_path

LORA = ("lora.rank=4", "learning_rate.name=constant", "learning_rate.warmup_steps=0")
CHUNKS = ("mesh.pipeline=2", "pipeline.schedule=interleaved_1f1b", "pipeline.num_chunks=2")


def test_a_run_with_adapters_starts_from_a_base_run_and_resumes_on_another_mesh(straight, run, tmp_path, capsys):
    words = (*LORA, f"init_from={straight.directory}", "eval_every=0")
    run(tmp_path / "run", *words, *CHUNKS, "num_steps=1")
    again = run(tmp_path / "run", *words, "mesh.tensor=2", "num_steps=2")
    assert list(again.losses) == [1, 2]
    base = by_path(straight.result.state.params)
    two = by_path(again.result.state.params)
    num_trained = sum(weight.size for path, weight in two.items() if is_adapter(path))
    assert f"{again.result.assembly.task.num_parameters:,} parameters, {num_trained:,} of them trained" in again.output
    assert {path for path in two if not is_adapter(path)} == set(base)
    for path, weight in two.items():
        if is_adapter(path):
            assert np.any(weight), path
        else:
            np.testing.assert_array_equal(weight, base[path], err_msg=path)
    assert generate.main([f"--workdir={again.directory}", "--prompt=def", "--num-tokens=4"]) == 0
    assert capsys.readouterr().out.startswith("def")
    assert evaluate.main([f"--workdir={again.directory}", "--json", "--config.num_eval_batches=2"]) == 0
    [found] = json.loads(capsys.readouterr().out.splitlines()[-1])["files"]
    assert found["loss"] == pytest.approx(again.result.values["eval_loss"], rel=1e-5)


def assembly_of(config, saved, params):
    """As much of an assembly as a beginning needs: weights of two kinds, one of them an adapter's."""
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    abstract = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=here), params)
    state = types.SimpleNamespace(params=abstract)
    replicas = types.SimpleNamespace(trained={name: is_adapter(name) for name in params})
    with Checkpoints(saved / CHECKPOINTS, CheckpointOptions()) as checkpoints:
        checkpoints.save(3, {"params": {"w": jnp.full((2, 2), 1 / 3), **config.pop("more", {})}}, {})
    given = Config(init_from=str(saved), lora=LoraOptions(rank=2), **config)
    return types.SimpleNamespace(
        config=given,
        states=types.SimpleNamespace(kept=state),
        state=state,
        placed=types.SimpleNamespace(replicas=replicas),
    )


FRESH = {"w_lora_a": jnp.full((2, 2), 5.0), "w_lora_b": jnp.zeros((2, 2))}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_of_a_base_run_are_read_in_the_dtype_of_frozen_ones(tmp_path, dtype):
    params = {"w": jnp.zeros((2, 2), dtype), **FRESH}
    assembly = assembly_of({"precision": PrecisionOptions(frozen_dtype=dtype)}, tmp_path, params)
    taken, rounded = base_weights._loadable_params(assembly, str(tmp_path), None)
    assert taken == {"w": assembly.state.params["w"], "w_lora_a": None, "w_lora_b": None}
    read = restore_params(tmp_path, None, taken, rounded)[0]["w"]
    np.testing.assert_array_equal(read, jnp.full((2, 2), 1 / 3).astype(dtype))
    assert read.dtype == dtype
    with pytest.raises(UserError, match=r"params/w_lora_a: not in the checkpoint"):
        restore_params(tmp_path, None, assembly.state.params, rounded)


def test_adapters_of_another_run_go_on(tmp_path):
    params = {"w": jnp.zeros((2, 2)), **FRESH}
    assembly = assembly_of({"more": FRESH}, tmp_path, params)
    taken, _ = base_weights._loadable_params(assembly, str(tmp_path), None)
    np.testing.assert_array_equal(restore_params(tmp_path, None, taken)[0]["w_lora_a"], FRESH["w_lora_a"])
