"""Runs random valid and invalid configurations in `explain` and `plan --cluster=cpu:8`; only user errors are allowed.

    scripts/bench fuzz [--cases=2000] [--seed=0]

A case changes one to four fields of a tiny configuration, on the command line, in a file, or in both; the first case
changes none. Values are legal, at the bounds, beyond them, or of another type. One case in 50 is planned (and compiled
if it is legal); the others are explained. The program rejects a case with UserError or accepts it. Any other exception
is printed with the case, and the exit code is 1.
"""

import argparse
import collections
import contextlib
import dataclasses
import io
import random
import sys
import tempfile
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from meshtrain import explain
from meshtrain.config.schema import Config
from meshtrain.errors import UserError
from meshtrain.examples.convnet import ConvnetOptions
from meshtrain.examples.numbers import NumberOptions
from meshtrain.examples.seq2seq import Seq2SeqOptions
from meshtrain.launch import distributed
from meshtrain.plan import __main__ as plan

NUM_DEVICES, MOST_FIELDS, CASES_A_PLAN = 8, 4, 50
SMALL = {
    "batch_size": 8, "sequence_length": 16, "model.num_layers": 2, "model.embed_dim": 16, "model.mlp_dim": 32,
    "model.num_heads": 4, "model.num_kv_heads": 4, "model.vocab_size": 257, "model.vocab_multiple": 8,
    "data.source": "synthetic",
}  # fmt: skip
# Python literals that a configuration file may assign; none is a legal value of any field.
STRANGE = (
    "None", "object()", "1j", "b'x'", "[1, 2]", "{'a': 1}", "{}", "()", "float('nan')", "-float('inf')", "10**400",
    "-(10**5000)", "1 << 70", "'\\udcff'", "'a\\0b'", "lambda: 0", "__import__('numpy').zeros(3)", "list(range(10**5))",
    "__import__('fractions').Fraction(10**400, 3)", "type('Odd', (), {'__repr__': lambda self: 1 / 0})()",
    "type('Odd', (dict,), {'items': lambda self: 1 / 0, '__bool__': lambda self: True})()",
)  # fmt: skip
WORDS = (
    "many",
    "nan",
    "inf",
    "-1e999",
    "9" * 400,
    "-" + "9" * 5000,
    "1e40",
    "",
    " ",
    "0x10",
    "1,2",
    "()",
    "\udcff",
    "1_0",
)
TEXTS = (
    "", "x", "(", ".*", "query", "3", "10,13", "5,2", "9" * 5000, "nowhere/*.txt", "~nobody/x", "decoder", "seq2seq",
    "convnet", "synthetic", "numbers", "digits", "bytes", "no.such:function", "eval_loss", "é",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Case:
    """A command line and its configuration file."""

    words: tuple[str, ...]
    file: str


def fields(options: Any, prefix: str = "") -> Iterator[tuple[str, dataclasses.Field[Any]]]:
    """Yields the dotted key and the field of each option, including nested groups."""
    for field in dataclasses.fields(options):
        value = getattr(options, field.name)
        if dataclasses.is_dataclass(value):
            yield from fields(value, f"{prefix}{field.name}.")
        else:
            yield prefix + field.name, field


def value_of(field: dataclasses.Field[Any], chance: random.Random) -> Any:
    """Returns a value of the field's type; most values are legal if no other field changes."""
    if isinstance(field.default, bool):
        return chance.random() < 0.5
    if isinstance(field.default, str):
        return chance.choice((*field.metadata["choices"], field.default) if chance.random() < 0.7 else TEXTS)
    least, most = (field.metadata[name] for name in ("minimum", "maximum"))
    beyond = [bound + sign for bound, sign in ((least, -1), (most, 1)) if bound is not None]
    bounds = [bound for bound in (least, most) if bound is not None]
    drawn = chance.random()
    if drawn < 0.8:
        return chance.choice(
            (1, 2, 3, 4, 8, 16, field.default) if isinstance(field.default, int) else (0.0, 0.5, 1.0, 3e-4)
        )
    return chance.choice([*bounds, -1, 0] if drawn < 0.93 else beyond)


def drawn_case(
    chance: random.Random, known: Sequence[tuple[str, dataclasses.Field[Any]]], file: Path, num_fields: int
) -> Case:
    """Returns a case that changes `num_fields` fields, for a configuration file at this path."""
    lines = [f"config.{key} = {value!r}" for key, value in SMALL.items()]
    words = [f"--config={file}"]
    for key, field in chance.sample(known, num_fields):
        value, is_strange = value_of(field, chance), chance.random() < 0.15
        if chance.random() < 0.03:
            key = f"{key[:-1]}{chance.choice(('', 'x', '.y'))}"
        if chance.random() < 0.5:
            words.append(f"--config.{key}={chance.choice(WORDS) if is_strange else value}")
        else:
            lines.append(f"config.{key} = {chance.choice(STRANGE) if is_strange else repr(value)}")
    body = "\n    ".join(["config = default()", *lines, "return config"])
    return Case(tuple(words), f"from meshtrain.config import default\n\n\ndef get_config():\n    {body}\n")


def outcome(case: Case, file: Path, is_planned: bool) -> str:
    """Returns `refused`, `passed`, or the traceback of an unexpected exception."""
    file.write_text(case.file, encoding="utf-8")
    words = list(case.words)
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            plan.main(["--cluster=cpu:8", *words]) if is_planned else explain.main(words)
    except UserError:
        return "refused"
    except Exception:  # noqa: BLE001  this script searches for all exceptions
        return traceback.format_exc()
    return "passed"


def main(argv: Sequence[str]) -> int:
    """Runs the cases and returns 1 if a case raised another exception than UserError."""
    parser = argparse.ArgumentParser(prog="scripts/bench fuzz", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--cases", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(argv)
    distributed.start(NUM_DEVICES)
    groups = (("model.", Seq2SeqOptions()), ("model.", ConvnetOptions()), ("data.", NumberOptions()))
    others = [(prefix + key, field) for prefix, options in groups for key, field in fields(options)]
    known = list(dict([*others, *fields(Config())]).items())
    chance, counts = random.Random(given.seed), collections.Counter[str]()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "random.py"
        for number in range(given.cases):
            num_fields, is_planned = chance.randint(1, MOST_FIELDS) if number else 0, number % CASES_A_PLAN == 0
            case = drawn_case(chance, known, file, num_fields)
            found = outcome(case, file, is_planned)
            if found not in ("refused", "passed"):
                print(f"case {number}: {'plan' if is_planned else 'explain'} {case.words}\n{case.file}\n{found}")
                found = "raised"
            counts[f"{'planned' if is_planned else 'explained'}, {found}"] += 1
            counts[found] += 1
    print(", ".join(f"{counts[name]} {name}" for name in sorted(counts) if "," in name))
    print(
        f"seed {given.seed}: {given.cases} cases, {counts['refused']} refused, {counts['passed']} passed, "
        f"{counts['raised']} exceptions other than UserError"
    )
    return 1 if counts["raised"] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
