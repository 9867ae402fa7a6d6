"""Names of other programs: the error about an unknown key or value suggests ours, and ours is accepted."""

import re

import pytest

from meshtrain.__main__ import main
from meshtrain.cli import flags, words
from meshtrain.config.build import build
from meshtrain.config.resolve import configure
from meshtrain.config.schema import Config
from meshtrain.errors import UserError, refusals
from meshtrain.user_functions import EXTENSION_POINTS

pytestmark = pytest.mark.quick

# What users of other programs type, and the option or value that the error has to suggest.
TRIES = {
    "mesh.ddp=2": "mesh.data=2",
    "mesh.model=2": "mesh.tensor=2",
    "mesh.sequence=2": "mesh.context=2",
    "fsdp=8": "mesh.fsdp=8",
    "Mesh.Data=8": "'mesh.data'",
    "tensor_parallel_size=2": "mesh.tensor=2",
    "TENSOR-MODEL-PARALLEL-SIZE=2": "mesh.tensor=2",
    "ici_tensor_parallelism=4": "mesh.tensor=4",
    "gradient_accumulation_steps=4": "accumulation_steps=4",
    "train_batch_size=8": "batch_size=8",
    "micro_batch_size=2": "batch_size (global) and accumulation_steps",
    "zero.stage=2": "zero.level=2",
    "zero_optimization.stage=2": "zero.level=2",
    "zero.strategy=FULL_SHARD": "full_shard",
    "zero.strategy=NO_SHARD": "no_shard",
    "offload_optimizer=cpu": "offload.moments=true",
    "offload_optimizer.device=cpu": "offload.moments=true",
    "fp16=true": "precision.policy=float16",
    "bf16=false": "leave it out",
    "precision=bf16": "precision.policy=bfloat16",
    "precision=fp7": "precision.policy (float32, bfloat16, float16, fp8)",
    "precision.policy=bf16": "'bfloat16'",
    "precision.policy=fp16": "'float16'",
    "gradient_checkpointing=true": "remat.policy=full",
    "lr=1e-3": "learning_rate.peak=1e-3",
    "lr=fast": "learning_rate.peak",
    "learning_rate=0.1": "learning_rate.peak=0.1",
    "optimizer.lr=1e-3": "learning_rate.peak=1e-3",
    "lr_scheduler_type=wsd": "learning_rate.name=warmup_stable_decay",
    "optimizer.name=AdamW": "adamw",
    "optim=adamw_torch_fused": "optimizer.name=adamw",
    "optimizer=SGD": "optimizer.name=sgd",
    "pipeline.schedule=Interleaved1F1B": "interleaved_1f1b",
    "epochs=3": "num_epochs=3",
    "warmup_ratio=0.1": "learning_rate.warmup_steps, a number of updates",
    "world_size=8": "launch",
    # Without an equivalent: the allowed values are listed.
    "zero.strategy=ddp": "allowed: '', no_shard, hybrid_shard, shard_grad_op, full_shard",
    "optimizer.name=schedule_free": "allowed: adamw, adam, sgd",
    "optimizer.name=soap": "allowed: adamw, adam, sgd",
    "pipeline.schedule=zbh1": "allowed: 1f1b, gpipe, interleaved_1f1b",
}


@pytest.mark.parametrize(("typed", "expected"), TRIES.items())
def test_the_error_suggests_our_name_and_a_value_that_is_accepted(typed, expected):
    lines = problems(typed)
    assert len(lines) == 1
    suggestion = re.search(r"(?:; nearest: |; did you mean )(.*)$", lines[0])[1]
    assert expected in (lines[0] if expected.startswith("allowed: ") else suggestion)
    if re.fullmatch(r"[\w.]+=\S+", suggestion):
        assert not problems(suggestion)


def problems(assignment: str) -> list[str]:
    """Returns the error lines of the defaults with one assignment."""
    arguments = flags.arguments([f"--config.{assignment}"])
    return refusals(configure, arguments, [])


def test_each_row_of_the_table_names_an_option_and_no_name_is_listed_twice():
    entries = flags.schema(Config())
    for name in EXTENSION_POINTS["reduction.name"].optional_names:  # an option of a reduction is listed too
        entries |= flags.schema(build({"reduction": {"name": name}}, {})[0])
    names = {ours.partition("=")[0] for ours in words.OPTIONS.values() if " " not in ours}
    assert names <= set(entries)
    for (key, _), ours in words.VALUES.items():
        assert not entries[key].choices or ours in entries[key].choices
    for table in (words._OPTIONS, words._VALUES):
        pairs = words._pairs(table)
        listed = [(ours.partition("=")[0] if table is words._VALUES else "", word) for word, ours in pairs]
        assert sorted(listed) == sorted(set(listed))


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["3d"], "--config: got '3d' without the flag; allowed: --config=FILE; nearest: --config=3d"),
        (["-c", "3d"], "did you mean '--config'?"),
        (["-w", "runs/x"], "did you mean '--workdir'?"),
        (["--lr=1e-3"], "nearest: --config.learning_rate.peak=1e-3"),
        (["--bf16"], "nearest: --config.precision.policy=bfloat16"),
        (["--nproc_per_node=8"], "nearest: `launch --processes=N`"),
    ],
)
def test_an_unknown_argument_is_told_the_flag(arguments, expected):
    assert expected in flags.arguments(arguments).problems[0]


@pytest.mark.parametrize(
    ("word", "expected"),
    [("version", "--version"), ("help", "--help"), ("eval", "evaluate"), ("fit", "train --config=3d")],
)
def test_an_unknown_command_is_told_the_command(word, expected):
    with pytest.raises(UserError, match=f"nearest: {expected}$"):
        main([word])


def test_without_arguments_the_help_is_printed(capsys):
    assert main([]) == 0
    assert capsys.readouterr().out.startswith("usage: ")
