"""Broken configurations and command lines in bulk: exit code 2, lines that help, nothing written, no hang."""

import random

import pytest

from meshtrain.cli import flags
from meshtrain.config.schema import Config
from tests.messages.refused import ODD, Case, assert_refused, odd_things, small

LEAVES = flags.schema(Config())


def limits(options, prefix=""):
    """{dotted key: (minimum, maximum)} of every number."""
    import dataclasses

    found = {}
    for field in dataclasses.fields(options):
        value = getattr(options, field.name)
        if dataclasses.is_dataclass(value):
            found |= limits(value, f"{prefix}{field.name}.")
        elif field.metadata["maximum"] is not None:
            found[prefix + field.name] = field.metadata["minimum"], field.metadata["maximum"]
    return found


def wrong_values():
    """(key, text) of each way in which a leaf of the configuration can be wrong by itself."""
    bounds = limits(Config())
    for key, entry in LEAVES.items():
        if entry.kind in (int, float):
            minimum, maximum = bounds[key]
            yield from ((key, text) for text in ("many", "nan", "", "9" * 400, "-" + "9" * 5000))
            yield key, "1e40"
            if minimum is not None:
                yield key, str(minimum - 1)
            if entry.kind is int:
                yield key, str(maximum + 1)
        elif entry.kind is bool:
            yield from ((key, text) for text in ("maybe", ""))
        elif entry.choices:
            yield from ((key, text) for text in (entry.choices[-1][:-1], "zzz"))


def misspelt(key):
    return key[:-1] if key[-1] != "s" else key + "s"


def leaf_cases():
    """Every leaf is wrong at once, in as many ways as it can be: each is told. By itself, one way in 32."""
    by_leaf = {}
    for key, text in wrong_values():
        by_leaf.setdefault(key, []).append(text)
    for number in range(max(map(len, by_leaf.values()))):
        texts = {key: values[number] for key, values in by_leaf.items() if number < len(values)}
        words = [f"{key}={text}" for key, text in texts.items()]
        starts = tuple(f"{key}: " for key in texts)
        yield Case(f"all leaves, {number}", lambda folder, words=words: small(folder, *words), starts)
    names = [misspelt(key) for key in LEAVES]
    starts = tuple(f"{name}: unknown key" for name in names)
    yield Case("all leaves misspelt", lambda folder: small(folder, *(f"{name}=1" for name in names)), starts)
    for key, text in [*list(wrong_values())[::32], ("mesh.data", "many")]:
        yield Case(
            f"{key}={text[:20]}", lambda folder, key=key, text=text: small(folder, f"{key}={text}"), (f"{key}: ",)
        )


def pair_cases():
    """The checks across fields do without what is wrong by itself, whatever it is."""
    draw, wrong = random.Random(0), sorted(wrong_values())
    for number in range(5):
        (one, a), (other, b) = draw.sample(wrong, 2)
        if one != other:
            yield Case(
                f"pair {number}: {one}={a[:20]} {other}={b[:20]}",
                lambda folder, texts=(f"{one}={a}", f"{other}={b}"): small(folder, *texts),
                (f"{one}: ", f"{other}: "),
            )


BODY = "from meshtrain.config import default\ndef get_config():\n    config = default()\n    {}\n    return config\n"
ITEMS = (
    "class Items(dict):\n    def items(self): raise ValueError('two\\nlines')\n    def __bool__(self): return True\n"
)
FILES = {
    "syntax": "def get_config(:\n",
    "no function": "x = 1\n",
    "raises": "def get_config():\n    raise RuntimeError('two\\nlines')\n",
    "exits": "import sys\nsys.exit(0)\n",
    "raises no Exception": "class Own(BaseException): pass\nraise Own\n",
    "recursion": "def get_config():\n    return get_config()\n",
    "returns None": "def get_config():\n    return None\n",
    "generator": "def get_config():\n    yield 1\n",
    "wants an argument": "def get_config(x):\n    return x\n",
    "numbers as keys": "def get_config():\n    return {1: 2, 'mesh': {3: 4}}\n",
    "a group is a number": BODY.format("config.mesh = 3"),
    "a value is a group": BODY.format("config.seed = {'a': {'b': 1}}"),
    "holds itself": "def get_config():\n    found = {}\n    found['mesh'] = found\n    return found\n",
    "required": BODY.format("import ml_collections as m; config.seed = m.config_dict.required_placeholder(int)"),
    "placeholder": BODY.format("import ml_collections as m; config.seed = m.config_dict.placeholder(int)"),
    "an array": BODY.format("import numpy; config.num_steps = numpy.zeros(3)"),
    "nan": BODY.format("config.learning_rate.peak = float('nan')"),
    "an array in the model of another task": BODY.format(
        "import numpy; config.task = 'seq2seq'; config.model.num_layers = numpy.zeros(3)"
    ),
    "400 digits": BODY.format("config.seed = 10**400"),
    "20,000 unknown keys of a group": BODY.format("config.model = {f'num_layer{i}': i for i in range(20_000)}"),
    "a message that raises": "class E(Exception):\n    def __str__(self): raise ValueError\nraise E\n",
    "a key that raises": "class K:\n    def __str__(self): raise ValueError\ndef get_config():\n    return {K(): 1}\n",
    "items of a group that raise": ITEMS + BODY.format("config.mesh = Items()"),
    "a zero byte": BODY.format("config.data.path = 'a\\0b'"),
    "half a surrogate pair": BODY.format("config.data.path = '\\udcff'"),
    "no such module": "import nosuchmodule\n",
    "no such field": BODY.format("config.mash.tensor = 2"),
}


def file_cases():
    for name, content in FILES.items():

        def prepare(folder, content=content):
            (folder / "broken.py").write_text(content)
            return ["--config=broken.py", "--workdir=run"]

        yield Case(f"file: {name}", prepare)


def place_cases():
    for what in ODD:

        def prepare(folder, what=what):
            return small(folder, f"init_from={odd_things(folder)[what]}")

        yield Case(f"init_from: {what}", prepare, ("init_from: ",))


CASES = [*leaf_cases(), *pair_cases(), *file_cases(), *place_cases()]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name[:80].encode("ascii", "replace").decode())
def test_a_broken_configuration_is_refused(case, tmp_path, monkeypatch):
    assert_refused(case, tmp_path, monkeypatch)


def test_there_are_many_and_each_is_its_own():
    assert len({case.name for case in CASES}) == len(CASES)
    told = [start for case in CASES for start in case.starts]
    assert len(told) >= 500
    # A text can be anything that its package takes; all else has a wrong value, and every leaf can be misspelt.
    assert all(f"{key}: " in told for key, entry in LEAVES.items() if entry.kind is not str or entry.choices)
    assert all(f"{misspelt(key)}: unknown key" in told for key in LEAVES)
