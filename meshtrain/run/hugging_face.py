"""Prints a configuration for a Hugging Face folder, imports the folder into a workdir, or exports a run.

python -m meshtrain hf config DIR [--config.data.source=chat --config.data.path=FILE --config.lora.rank=16] > mine.py
python -m meshtrain hf import DIR --to=runs/mine
python -m meshtrain hf export --workdir=runs/mine --to=DIR [--dtype=bfloat16] [--adapters] [--weights=average]
"""

import argparse
import contextlib
import dataclasses
import json
import re
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import jax

from meshtrain.checkpoint.checkpoint import CHECKPOINTS, Checkpoints
from meshtrain.cli import flags, foreign, output_files
from meshtrain.config.build import build
from meshtrain.config.data_sources import find
from meshtrain.config.from_hugging_face import as_file, fine_tuned, of_folder
from meshtrain.config.records import record
from meshtrain.config.resolve import resolve, to_json
from meshtrain.config.schema import CONFIG_FILE, Config
from meshtrain.config.tasks import abstract_task
from meshtrain.data.chat_template import template_text
from meshtrain.data.encoding.tokenizer_folder import TEMPLATE, TOKENIZER, end_ids, settings, special_tokens
from meshtrain.data.sources import reads_documents
from meshtrain.data.tokenizer import NO_TOKEN, NUM_BYTES, file_tokenizer, open_tokenizer, with_begin_token
from meshtrain.errors import Problem, UserError, refuse, run, warn
from meshtrain.files import (
    JsonObject,
    download_command,
    expand_user,
    is_url,
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
    differences,
    has_images,
    is_decoder,
    is_described,
    notes,
)
from meshtrain.launch import peers
from meshtrain.models.moe.experts import MATRICES
from meshtrain.run import weights
from meshtrain.run.dataset import open_data
from meshtrain.run.weights import assemble_run, configuration

EOS, BOS = "eos_token", "bos_token"
ACTIONS = ("config", "import", "export")
ORIGINAL = "hugging_face"  # folder in an imported workdir: config.json and tokenizer files of the Hugging Face folder


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
    weights.add_weights_flag(parser)
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
        got = "a folder without config.json of a model" if what == "a folder" else what
        is_run = given is not None and what_is_at(expand_user(given) / CHECKPOINTS) == "a folder"
        fix = (
            f"`hf export --workdir={given} --to=DIR` makes one"
            if is_run
            else download_command(given or "") or snapshot_of(given or "")
        )
        fix = fix or "download one"
        problems.append(Problem(given or "hf", got=got, allowed="a Hugging Face folder", nearest=fix))
    if action == "config" and arguments.to is not None:
        problems.append(
            Problem(
                "--to",
                got=f"'{arguments.to}' with config, which prints",
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
    if arguments.weights != weights.LAST and action != "export":
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
        warn(f"{folder}: got no safetensors file, so a run begins with random weights; nearest: download the files, "
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
    also = weights.choice_problems(arguments.weights, arguments.workdir)
    config = configuration(arguments, also, reads_data=False, reads_origin=True)
    refuse(_unlike_export(config, is_of_adapters=arguments.adapters))
    options = config.model
    if options.positions == "learned":
        options = dataclasses.replace(options, max_positions=options.max_positions or config.sequence_length)
    original = _original(config, arguments.workdir)
    came = describe_model(original, ignore=None) if original is not None else None
    family = came.family if came is not None else family_of(options)
    given = config_of_text(original) if original is not None else {}
    assembly = assemble_run(config, arguments.workdir, arguments.step, folds_pipeline=True)
    if peers.count() > 1:
        raise UserError(Problem("hf export", got=f"{peers.count()} processes", allowed=1, nearest="start one of them"))
    like, averaged = assembly.states.kept.params, arguments.weights == weights.AVERAGE
    place = weights.checkpoints_of(config, arguments.workdir)
    params, _ = weights.restore_params(place, arguments.step, like, averaged=averaged)
    if arguments.adapters:
        dtype = arguments.dtype or "float32"
        # A copy that `hf import` made has no weights, and a folder with images has other names of modules.
        has_weights = original is not None and any(original.glob("*.safetensors")) and not has_images(original)
        base = str(original.absolute()) if original is not None and has_weights else None
        with _complete_folder(arguments.to) as target:
            num_bytes = adapters.write(target, family, options, config.lora, params, dtype, base)
        beneath = base or f"the model of {config.init_from or 'initial weights'}"
        print(f"{num_bytes:,} bytes of {dtype} in {Path(arguments.to)}, adapters of a {family}; beneath: {beneath}")
        return
    dtype = arguments.dtype or (came.dtype if came is not None and came.dtype in export.DTYPES else "float32")
    config = _as_text(config, original)
    of_text, written, end_id = _text_files(config, original)
    ids = _special_ids(config, original, end_id)
    stated = as_json(options, family, dtype, config.sequence_length, end_id, given) | ids
    chosen = _chosen_tokens(config, of_text, written, end_id)
    written |= export.special_token_files(ids, chosen, original, of_text)
    with _complete_folder(arguments.to) as target:
        num_bytes = export.write_weights(target, family, options, params, dtype, config.lora)
        export.write_rest(target, stated, original, of_text, written)
    print(f"{num_bytes:,} bytes of {dtype} in {Path(arguments.to)}, a {family}")


@contextlib.contextmanager
def _complete_folder(to: str) -> Iterator[Path]:
    """Creates the folder of `--to`, or uses an empty one; if the block fails, deletes the files that it has written."""
    target = expand_user(to).absolute()
    try:
        with output_files.writing("--to", to):
            target.mkdir(parents=True, exist_ok=True)
            yield target
    except BaseException:
        for file in target.glob("*"):
            file.unlink()
        raise


def _unlike_export(config: Config, *, is_of_adapters: bool) -> list[Problem]:
    """Returns an error line if a run cannot be exported, else [].

    Args:
      config: the run's configuration.
      is_of_adapters: whether only the adapters are exported.
    """
    if not is_decoder(config.model):
        return [
            Problem(
                "task", got=config.task, condition="for export", allowed="decoder", nearest="the workdir of a decoder"
            )
        ]
    if not is_of_adapters:
        return []
    if not config.lora.rank:
        return [
            Problem("--adapters", got="a run without adapters, lora.rank=0", allowed="one with", nearest="leave it out")
        ]
    if config.optimizer.trainable:
        return [
            Problem(
                "--adapters",
                got=f"a run with optimizer.trainable={config.optimizer.trainable}, whose weights stand in no adapter",
                allowed="adapters alone",
                nearest="leave it out",
            )
        ]
    of_experts = [f"layers/experts/{name}" for name in MATRICES]
    if config.model.moe.num_experts and any(re.search(config.lora.targets, path) for path in of_experts):
        return [
            Problem(
                "--adapters",
                got=(
                    f"a run with adapters of experts, lora.targets='{config.lora.targets}', for which the package peft "
                    "has no modules"
                ),
                allowed="adapters of attention",
                nearest="leave it out, and they are merged",
            )
        ]
    return []


def _original(config: Config, workdir: str | Path) -> Path | None:
    """Returns the Hugging Face folder from which a run's model came; None if it is not on this machine.

    Candidates are the workdir, the folder of the starting weights, and the folder `hugging_face` in each of them. The
    first candidate whose config.json describes the run's model is returned.

    Args:
      config: the run's configuration.
      workdir: the run's folder, or a Hugging Face folder.
    """
    given = [
        expand_user(one) for one in (workdir, weights.base_weights(config)[0]) if str(one) and not is_url(str(one))
    ]
    for folder in (one / inner for one in given for inner in ("", ORIGINAL)):
        if is_described(folder):
            theirs = describe_model(folder, ignore=None).options
            if not differences(config.model, theirs, config.sequence_length, folder):
                return folder
    return None


def _as_text(config: Config, original: Path | None) -> Config:
    """Replaces the data source `tokens` by `text`, with the tokenizer, end token and begin token of the token files.

    The configuration is returned unchanged for other sources, or if the token files are not on this machine.

    Args:
      config: the run's configuration.
      original: the Hugging Face folder from which the model came; None if there is none. If its tokenizer.json is equal
        to the tokenizer of the token files, the folder becomes `data.tokenizer`.
    """
    if config.data.source != "tokens":
        return config
    try:
        tokenizer = find(config.data.source).tokenizer(config.data, config.model.vocab_size)
    except UserError:
        return config
    name, end_token, begin_token = tokenizer.name, "", ""
    if name != "bytes":
        content = settings("", name)
        vocab = content["model"]["vocab"]
        texts = {number: text for text, number in vocab.items()} if isinstance(vocab, dict) else {}
        texts |= {one["id"]: one["content"] for one in content["added_tokens"]}
        end_token = texts[tokenizer.end_id] if tokenizer.end_id in texts else ""
        own = None if original is None else original / TOKENIZER
        if own is not None and what_is_at(own) == "a file" and own.read_bytes() == Path(name).read_bytes():
            name = str(original)
        begin = [texts[one] for one in tokenizer.begin if one in texts] or [NO_TOKEN]
        begin_token = begin[0] if len(begin) == 1 else ""  # tokenizer.json itself defines several begin tokens
    data = dataclasses.replace(config.data, source="text", tokenizer=name, end_token=end_token, begin_token=begin_token)
    return dataclasses.replace(config, data=data)


def _text_files(config: Config, original: Path | None) -> tuple[Path | None, dict[str, str], int]:
    """Returns the files of a run's tokenizer and chat template, for an exported folder.

    Args:
      config: the run's configuration.
      original: the Hugging Face folder from which the model came; None if there is none. Its files are copied if the
        data have no tokenizer, or if the tokenizer is not on this machine.

    Returns:
      The folder to copy files from (None: no folder), name -> content of the files to write, and the id of the token
      that ends a document (-1: no token).
    """
    data, size = config.data, config.model.vocab_size
    written, what = dict[str, str](), what_is_at(data.tokenizer)
    if what_is_at(data.chat_template) == "a file":
        written[TEMPLATE] = template_text(data.chat_template)
    if not reads_documents(data):
        return original, written, -1
    if data.tokenizer == "bytes":
        return (None, export.byte_files() | written, NUM_BYTES) if size > NUM_BYTES else (None, written, -1)
    if what not in ("a file", "a folder"):
        return original, written, -1
    end_id = file_tokenizer(data.tokenizer, data.end_token, NO_TOKEN).end_id
    if changed := with_begin_token(data.tokenizer, data.begin_token):
        written[TOKENIZER] = changed
    end_id = end_id if end_id < size else -1
    if what == "a folder":
        return Path(data.tokenizer), written, end_id
    content = Path(data.tokenizer).read_text(encoding="utf-8")
    beside = Path(data.tokenizer).parent
    return beside if beside == original else None, {TOKENIZER: content, **written}, end_id


def _special_ids(config: Config, original: Path | None, end_id: int) -> JsonObject:
    """Returns the special token ids for an exported config.json; empty if the ids of the original folder are unchanged.

    `eos_token_id` is an id, or a list if several ids end a text. If the run's vocabulary differs from the original's,
    the result also has `bos_token_id` and `pad_token_id`: an id, or None if the tokenizer has no such token.

    Args:
      config: the run's configuration.
      original: the Hugging Face folder from which the model came; None if there is none.
      end_id: the id that ends a document, from `_text_files`; -1: the run read no text, so the result is empty.
    """
    used, size = config.data.tokenizer, config.model.vocab_size
    if end_id < 0:
        return {}
    ends = [one for one in dict.fromkeys((end_id, *end_ids(used))) if one < size]
    file = None if original is None else original / TOKENIZER
    is_same = file is not None and (what_is_at(file) != "a file" or weights.has_same_vocabulary(used, file))
    if is_same and {*ends} == {*end_ids(str(original))}:
        return {}
    ids: JsonObject = {"eos_token_id": ends if len(ends) > 1 else end_id}
    if is_same:
        return ids
    tokenizer, named = open_tokenizer(used, config.data.end_token, NO_TOKEN), special_tokens(settings(used))
    for name in (BOS, "pad_token"):
        encoded = tokenizer.encode(named[name]) if name in named else []
        ids[f"{name}_id"] = encoded[0] if len(encoded) == 1 else None
    return ids


def _chosen_tokens(
    config: Config, of_text: Path | None, written: Mapping[str, str], end_id: int
) -> dict[str, str | bool]:
    """Returns entries of an export's tokenizer_config.json that replace the entries of the copied tokenizer.

    They are `eos_token`, `bos_token` and `add_bos_token`, if the run's data options set them. A token whose key the
    chat template uses is not replaced, because the run was trained with texts from this template.

    Args:
      config: the run's configuration.
      of_text: the folder from which tokenizer files are copied; None: no folder.
      written: name -> content of the files to write; they may include the chat template.
      end_id: the id that ends a document; -1: the run read no text, so the result is empty.
    """
    if end_id < 0 or config.data.tokenizer == "bytes":
        return {}
    content = {} if of_text is None else settings(str(of_text))
    if TEMPLATE in written:
        template = written[TEMPLATE]
    elif of_text is not None and what_is_at(of_text / TEMPLATE) == "a file":
        template = template_text(of_text / TEMPLATE)
    else:
        template = json.dumps(content["chat_template"]) if "chat_template" in content else ""
    begin = config.data.begin_token
    tokens = {EOS: config.data.end_token, BOS: "" if begin == NO_TOKEN else begin}
    chosen: dict[str, str | bool] = {key: token for key, token in tokens.items() if token and key not in template}
    if begin and "add_bos_token" in content:  # some tokenizer classes rebuild the post-processor from this entry
        chosen["add_bos_token"] = begin != NO_TOKEN
    return chosen


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
