"""Prints a configuration for a Hugging Face folder, imports the folder into a workdir, or exports a run.

python -m meshtrain hf config DIR [--config.data.source=chat --config.data.path=FILE --config.lora.rank=16] > mine.py
python -m meshtrain hf import DIR --to=runs/mine
python -m meshtrain hf export --workdir=runs/mine --to=DIR [--dtype=bfloat16] [--adapters] [--weights=average]
"""

import argparse
import contextlib
import dataclasses
import json
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import jax

from meshtrain.checkpoint.checkpoint import CHECKPOINTS, Checkpoints
from meshtrain.cli import flags, foreign, output_files
from meshtrain.config.build import build
from meshtrain.config.from_hugging_face import as_file, fine_tuned, of_folder
from meshtrain.config.records import record
from meshtrain.config.resolve import resolve, to_json
from meshtrain.config.schema import CONFIG_FILE
from meshtrain.config.tasks import abstract_task
from meshtrain.errors import Problem, UserError, refuse, run, warn
from meshtrain.files import (
    download_command,
    expand_user,
    read_json,
    snapshot_of,
    what_is_at,
    write_whole,
)
from meshtrain.hf import adapters, export
from meshtrain.hf.config_export import as_json, family_of
from meshtrain.hf.config_json import (
    QUANTIZED,
    TIED,
    config_of_text,
    describe_model,
    has_images,
    is_described,
    notes,
)
from meshtrain.launch import peers
from meshtrain.run import existing_run, weights
from meshtrain.run.dataset import open_data
from meshtrain.run.existing_run import assemble_run, configuration
from meshtrain.run.exporting import (
    ORIGINAL,
    export_problems,
    original_folder,
    special_ids,
    text_files,
    tokenizer_settings,
    with_text_source,
)

ACTIONS = ("config", "import", "export")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m meshtrain hf", description="Reads and writes Hugging Face folders.", add_help=False
    )
    parser.add_argument(
        "action", nargs="?", help="config prints a configuration file, import writes a workdir, export a folder"
    )
    parser.add_argument("directory", metavar="DIR", nargs="?", help="for config and import: the Hugging Face folder")
    parser.add_argument("--to", metavar="DIR", help="for import: the workdir; for export: the folder; new or empty")
    parser.add_argument("--step", type=int, help="for export: step of the checkpoint (default: the newest)")
    parser.add_argument(
        "--dtype", help="for export: float32, bfloat16 or float16 (default: the folder's own, or float32)"
    )
    parser.add_argument("--ignore", action="append", metavar="KEY", help="a key of config.json to ignore")
    parser.add_argument(
        "--adapters",
        action="store_true",
        help="for export: only the adapters, for the package peft; otherwise they are merged",
    )
    existing_run.add_weights_flag(parser)
    return parser


def _problems(arguments: argparse.Namespace) -> list[Problem]:
    """Returns an error line for each wrong argument of `hf`."""
    problems, action, given = list[Problem](), arguments.action, arguments.directory
    if action not in ACTIONS:
        got = "nothing" if action is None else f"'{action}'"
        problems.append(Problem("hf", got=got, allowed=", ".join(ACTIONS), nearest="hf config DIR"))
    if action == "export" and given is not None:
        fix = f"--workdir={given}" if arguments.to else f"--to={given}"
        problems.append(Problem("hf export", got=f"'{given}'", allowed="--workdir=W --to=DIR", nearest=fix))
    if action not in ("export", None) and (given is None or not is_described(given)):
        what = "nothing" if given is None else what_is_at(expand_user(given))
        got = "a folder without a model's config.json" if what == "a folder" else what
        is_run = given is not None and what_is_at(expand_user(given) / CHECKPOINTS) == "a folder"
        fix = (
            f"`hf export --workdir={given} --to=DIR` creates one"
            if is_run
            else download_command(given or "") or snapshot_of(given or "")
        )
        fix = fix or "download one"
        problems.append(Problem(given or "hf", got=got, allowed="a Hugging Face folder", nearest=fix))
    if action == "config" and arguments.to is not None:
        problems.append(
            Problem(
                "--to",
                got=f"'{arguments.to}' with config, which only prints",
                allowed="none",
                nearest="hf import DIR --to=W",
            )
        )
    if action in ("import", "export"):
        problems += _target_problems(arguments.to, action, "runs/imported" if action == "import" else "models/exported")
    if arguments.dtype is not None and (action != "export" or arguments.dtype not in export.DTYPES):
        allowed = f"{', '.join(export.DTYPES)}, with export"
        problems.append(Problem("--dtype", got=f"'{arguments.dtype}'", allowed=allowed, nearest="leave it out"))
    if arguments.adapters and action != "export":
        problems.append(Problem("--adapters", got=f"hf {action}", allowed="with export", nearest="leave it out"))
    if arguments.weights != existing_run.LAST and action != "export":
        problems.append(Problem("--weights", got=f"hf {action}", allowed="with export", nearest="leave it out"))
    return problems


def _target_problems(to: str | None, action: str, near: str) -> list[Problem]:
    if not to:
        return [Problem("--to", got="nothing", allowed="a new folder", nearest=f"--to={near}")]
    target = expand_user(to).absolute()
    what = what_is_at(target)
    if what == "a folder" and any(target.iterdir()):
        near = f"{to.rstrip('/')}-{action}ed"
        return [Problem("--to", got=f"'{to}', which is not empty", allowed="a new folder", nearest=f"--to={near}")]
    return output_files.unwritable(target, "--to", near)


def _print_config(arguments: argparse.Namespace) -> str:
    """Returns the text of a configuration file that fine-tunes the model of a Hugging Face folder.

    The file contains the overrides of the command line. If they name data, the batch size and the number of steps are
    chosen for the number of training sequences. The data are opened to count the sequences.
    """
    given, folder, num_sequences = dict(arguments.overrides), expand_user(arguments.directory).absolute(), 0
    config = of_folder(folder, given.pop("init_ignore", ""))
    for note in notes(folder, describe_model(folder, ignore=None)):
        warn(note)
    if any(folder.glob("*.safetensors")):
        config = dataclasses.replace(config, init_from=str(folder))
    else:
        warn(f"{folder}: got no safetensors file, so a run starts with random weights; nearest: download the files, "
             f"and --config.init_from={folder}")  # fmt: skip
    checked = resolve(config, given) if given else config
    if checked.data.path:
        num_sequences = len(open_data(checked, abstract_task(checked)).train)
    config, _ = build(fine_tuned(config, checked.lora.rank, num_sequences), given)
    return as_file(folder, config, num_sequences)


def _import(arguments: argparse.Namespace) -> None:
    """Converts a Hugging Face folder to a workdir: config.json, and the weights as the checkpoint of step 0."""
    arguments.workdir = expand_user(arguments.directory)
    config = configuration(arguments, [], reads_data=False)
    assembly = assemble_run(config, arguments.workdir, None)
    params, _ = weights.restore_params(arguments.workdir, None, assembly.states.kept.params)
    target = expand_user(arguments.to).absolute()
    extra = {"config": record(config), "versions": {"jax": jax.__version__}}
    with Checkpoints(target / CHECKPOINTS, config.checkpoint) as checkpoints:
        checkpoints.save(0, {"params": params}, extra)
        checkpoints.wait()
    foreign.record_written(record(config))
    if peers.is_main_process():
        beside = target / ORIGINAL
        beside.mkdir()
        for name in (CONFIG_FILE, *export.COPIED):
            if (arguments.workdir / name).is_file():
                shutil.copyfile(arguments.workdir / name, beside / name)
        model = describe_model(arguments.workdir, ignore=None)
        if notes(arguments.workdir, model):  # the copy has no weights that show what config.json has wrong
            stated = read_json((beside / CONFIG_FILE).read_text(encoding="utf-8"))
            stated |= {TIED: False} if model.separate_head else {}
            stated = {key: value for key, value in stated.items() if key != QUANTIZED or not model.is_unquantized}
            write_whole(beside / CONFIG_FILE, json.dumps(stated, indent=2) + "\n")
        write_whole(target / CONFIG_FILE, to_json(config))
        print(f"{assembly.task.num_parameters:,} parameters in {Path(arguments.to)}")


def _export(arguments: argparse.Namespace) -> None:
    """Writes a run's weights as a Hugging Face folder, or its adapters as a folder of the package peft."""
    also = existing_run.choice_problems(arguments.weights, arguments.workdir)
    config = configuration(arguments, also, reads_data=False, reads_origin=True)
    refuse(export_problems(config, is_of_adapters=arguments.adapters))
    options = config.model
    if options.positions == "learned":
        options = dataclasses.replace(options, max_positions=options.max_positions or config.sequence_length)
    original = original_folder(config, arguments.workdir)
    came = describe_model(original, ignore=None) if original is not None else None
    family = came.family if came is not None else family_of(options)
    given = config_of_text(original) if original is not None else {}
    assembly = assemble_run(config, arguments.workdir, arguments.step, folds_pipeline=True)
    if peers.count() > 1:
        raise UserError(Problem("hf export", got=f"{peers.count()} processes", allowed=1, nearest="start one process"))
    like, averaged = assembly.states.kept.params, arguments.weights == existing_run.AVERAGE
    place = existing_run.checkpoints_of(config, arguments.workdir)
    params, _ = weights.restore_params(place, arguments.step, like, averaged=averaged)
    if arguments.adapters:
        dtype = arguments.dtype or "float32"
        # A copy that `hf import` made has no weights, and a folder with images has other names of modules.
        has_weights = original is not None and any(original.glob("*.safetensors")) and not has_images(original)
        base = str(original.absolute()) if original is not None and has_weights else None
        with _complete_folder(arguments.to) as target:
            num_bytes = adapters.write(target, family, options, config.lora, params, dtype, base)
        beneath = base or f"the model of {config.init_from or 'initial weights'}"
        print(f"{num_bytes:,} bytes of {dtype} in {Path(arguments.to)}, adapters of a {family}; base model: {beneath}")
        return
    dtype = arguments.dtype or (came.dtype if came is not None and came.dtype in export.DTYPES else "float32")
    config = with_text_source(config, original)
    of_text, written, end_id = text_files(config, original)
    ids = special_ids(config, original, end_id)
    stated = as_json(options, family, dtype, config.sequence_length, end_id, given) | ids
    chosen = tokenizer_settings(config, of_text, written, end_id)
    written |= export.special_token_files(ids, chosen, original, of_text)
    with _complete_folder(arguments.to) as target:
        num_bytes = export.write_weights(target, family, options, params, dtype, config.lora)
        export.write_rest(target, stated, original, of_text, written)
    print(f"{num_bytes:,} bytes of {dtype} in {Path(arguments.to)}, a {family}")


@contextlib.contextmanager
def _complete_folder(to: str) -> Iterator[Path]:
    """Context manager: creates the folder `to`, the value of `--to`, and yields its path.

    The folder may exist, but must be empty, because all its files are deleted if the block fails.
    """
    target = expand_user(to).absolute()
    try:
        with output_files.writing("--to", to):
            target.mkdir(parents=True, exist_ok=True)
            yield target
    except BaseException:
        for file in target.glob("*"):
            file.unlink()
        raise


def main(argv: Sequence[str]) -> int:
    """Runs `hf config`, `hf import` or `hf export`; returns the exit code.

    Raises:
      UserError: one line for each wrong argument or problem of a folder.
    """
    arguments = flags.arguments(argv, _parser())
    has_urls = any(", a URL;" in line for line in arguments.problems)  # `_problems` inspects local paths only
    refuse([*arguments.problems, *([] if has_urls else _problems(arguments))])
    if arguments.ignore:
        arguments.overrides["init_ignore"] = ",".join(arguments.ignore)
    if arguments.action == "config":
        print(_print_config(arguments), end="")
    elif arguments.action == "import":
        _import(arguments)
    else:
        _export(arguments)
    return 0


if __name__ == "__main__":
    run(lambda: main(sys.argv[1:]))
