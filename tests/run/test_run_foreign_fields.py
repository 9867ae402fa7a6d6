"""Nothing outside of a stranger's folder is imported, read or contacted because its files alone name it.

Each command opens a folder in which each field of the table names a planted module, file or bucket. An audit hook of
Python sees each file that is opened, each folder that is listed and each connection, whatever the exit code.
"""

import contextlib
import functools
import json
import os
import pathlib
import shlex
import shutil
import sys

import numpy as np
import pytest
from safetensors.numpy import save_file

from meshtrain import evaluate, files, generate, harness, hugging_face, verify
from meshtrain import main as train
from meshtrain.cli import flags, foreign
from meshtrain.cli.foreign import BASE, DATA, FIELDS, FUNCTION, ORIGIN, PATH, TEXT, WEIGHTS
from meshtrain.config import Config, tasks
from meshtrain.config.data_sources import names, options_of
from meshtrain.config.resume import from_json
from meshtrain.data.token_files import read_sidecar
from meshtrain.errors import UserError
from meshtrain.probe import doctor
from meshtrain.report import __main__ as report
from meshtrain.run import weights
from meshtrain.run.workdir import record
from meshtrain.store import buckets

FIXTURES = pathlib.Path(__file__).parents[1] / "hf" / "fixtures"
RUN = "stranger/run"
CONFIG = """
from meshtrain.config import default

def get_config():
    config = default()
    config.num_steps = config.num_eval_batches = 1
    config.batch_size, config.sequence_length, config.sample_tokens = 2, 32, 0
    config.model.num_layers = config.model.num_heads = config.model.num_kv_heads = 1
    config.model.embed_dim = config.model.mlp_dim = 16
    config.model.vocab_size = VOCABULARY
    config.learning_rate.warmup_steps = 0
    config.data.source, config.data.path = "chat", "stranger/run/chat.jsonl"
    config.data.tokenizer = "stranger/run/tokenizer"
    return config
"""
BUCKET = "gs://stranger-bucket/x"
WATCHED = ("open", "os.listdir", "os.scandir", "socket.connect", "socket.getaddrinfo")
seen = None  # what the hook has seen; None: it is off


def _hook(event, given):
    if seen is None or event not in WATCHED:
        return
    if event.startswith("socket"):
        if "stranger" in str(given) or event == "socket.connect":
            seen.append(f"{event} {given[1:]}")
            raise ConnectionAbortedError(f"a test forbids {event}")
    elif isinstance(given[0], str | bytes | os.PathLike) and "planted" in os.fsdecode(given[0]):
        seen.append(f"{event} {os.fsdecode(given[0])}")


@pytest.fixture(scope="module")
def hook():
    sys.addaudithook(_hook)  # for good, but off


@contextlib.contextmanager
def watched():
    global seen
    seen = []
    try:
        yield seen
    finally:
        seen = None


@pytest.fixture(scope="module")
def home(tmp_path_factory, hook):
    """A folder with a small run of one step, and with what its fields are to reach."""
    home = tmp_path_factory.mktemp("home")
    (home / RUN).mkdir(parents=True)
    shutil.copytree(FIXTURES / "chat", home / RUN / "tokenizer")
    talk = [{"role": "user", "content": "a b"}, {"role": "assistant", "content": "b a"}]
    (home / RUN / "chat.jsonl").write_text((json.dumps({"messages": talk}) + "\n") * 40)
    size = max(json.loads((FIXTURES / "chat" / "tokenizer.json").read_text())["model"]["vocab"].values()) + 9
    (home / "mine.py").write_text(CONFIG.replace("VOCABULARY", str(size)))
    with contextlib.chdir(home):
        assert train.main(["--config=mine.py", f"--workdir={RUN}"]) == 0
        planted = pathlib.Path("planted")
        shutil.copytree(RUN, planted / "run")
        shutil.copytree(FIXTURES / "llama", planted / "model")
        shutil.copytree(FIXTURES / "chat", planted / "tokenizer")
        (planted / "module.py").write_text("def function(*_): ...\n")
        (planted / "template.jinja").write_text("{{ messages }}")
        (planted / "prompts.jsonl").write_text('{"prompt": "a"}\n')
    return home


PLANTED = {
    **{key: "planted.module:function" for key, field in FIELDS.items() if field.kind == FUNCTION},
    "data.path": "planted/run/chat.jsonl",
    "data.validation_path": f"held=planted/run/chat.jsonl,{RUN}/chat.jsonl",
    "data.tokenizer": "planted/tokenizer",
    "data.chat_template": f"{RUN}/../../planted/template.jinja",
    "checkpoint.directory": "planted/run/checkpoints",
    "init_from": "planted/model",
    "init_base": "planted/model",
    "eval_prompts": "planted/prompts.jsonl",
}
IN_BUCKETS = {"data.path": f"{BUCKET}/*.jsonl", "checkpoint.directory": BUCKET, "init_from": BUCKET}
FUNCTIONS = tuple(key for key, field in FIELDS.items() if field.kind == FUNCTION)
HERE = f"--workdir={RUN}"
MINE = ["--config=mine.py", "--config.num_steps=2"]
NEW = ["--workdir=new", f"--config.init_from={RUN}"]


def read_for(*uses):
    """The fields of a configuration that a command which opens a folder for some uses refuses one by one."""
    return tuple(
        key for key, field in FIELDS.items() if key != BASE and (field.kind == FUNCTION or {*uses} & {*field.read_for})
    )


# Command -> how it is called, and the fields that it refuses each; the others are planted together.
COMMANDS = {
    "evaluate": (lambda: evaluate.main([HERE]), read_for(WEIGHTS, TEXT, DATA)),
    "generate": (
        lambda: generate.main([HERE, "--chat", "--prompt=a", "--num-tokens=1", "--temperature=0"]),
        read_for(WEIGHTS, TEXT),
    ),
    "harness": (lambda: harness.open_requests(RUN), read_for(WEIGHTS, TEXT)),
    "hf export": (lambda: hugging_face.main(["export", HERE, "--to=exported"]), read_for(WEIGHTS, TEXT, ORIGIN)),
    "verify": (lambda: verify.main([RUN]), ("checkpoint.directory",)),
    "report": (lambda: report.main([RUN, "--html=page.html"]), ()),
    "train": (lambda: train.main([*MINE, HERE]), ("task", "optimizer.name", "learning_rate.name", "reduction.name")),
    "checkpoint.directory": (
        lambda: train.main([*MINE, "--workdir=new", f"--config.checkpoint.directory={RUN}/checkpoints"]),
        ("task", "optimizer.name", "learning_rate.name", "reduction.name"),
    ),
    "init_from": (lambda: train.main([*MINE, *NEW, "--config.model.mlp_dim=8"]), ("checkpoint.directory",)),
    "doctor": (lambda: doctor.main([*MINE, HERE, "--limit=60"]), ()),
}


@pytest.fixture
def here(home, tmp_path, monkeypatch):
    """A copy of the folder, in which a test may plant."""

    def client():
        seen.append("the client of buckets")
        raise UserError("a test has no network")

    shutil.copytree(home, tmp_path / "home")
    monkeypatch.chdir(tmp_path / "home")
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(buckets, "_client", client)
    yield tmp_path / "home"
    for name in [name for name in sys.modules if name.partition(".")[0] == "planted"]:
        del sys.modules[name]


def plant(file, values):
    """Writes fields into a JSON file, at its beginning or below `config`; they are of a stranger's from then on."""
    content = json.loads(file.read_text())
    config = content.get("config", content)
    for key, value in values.items():
        group, _, field = key.rpartition(".")
        (config[group] if group else config)[field] = value
    file.write_text(json.dumps(content))


def reached(call):
    """What a command has reached, and the lines that it has refused with."""
    with watched() as found:
        try:
            call()
        except UserError as error:
            return found, error.problems
    return found, ()


def cases():
    for name, (_, refused) in COMMANDS.items():
        for key in refused:
            for value in filter(None, (PLANTED[key], IN_BUCKETS.get(key))):
                yield pytest.param(name, {key: value}, id=f"{name}-{key}-{value.partition(':')[0]}")
        rest = {key: value for key, value in (PLANTED | IN_BUCKETS).items() if key not in refused}
        yield pytest.param(name, rest, id=f"{name}-rest")


@pytest.mark.parametrize(("name", "values"), list(cases()))
def test_no_command_reaches_what_a_run_alone_names(here, name, values):
    call, refused = COMMANDS[name]
    of_checkpoint = here / RUN / "checkpoints" / "1" / "extra" / "metadata"
    plant(of_checkpoint if name == "checkpoint.directory" else here / RUN / "config.json", values)
    found, lines = reached(call)
    assert found == []
    if name not in ("train", "checkpoint.directory", "doctor", "report") and values.keys() <= {*refused}:
        [line] = lines
        assert all(f"{key}: got '{value}'" in line for key, value in values.items())
        assert "; nearest: " in line


@pytest.mark.parametrize("key", ["data.path", "data.tokenizer", "checkpoint.directory"])
def test_the_command_that_the_line_suggests_reads_it(here, key):
    plant(here / RUN / "config.json", {key: PLANTED[key]})
    _, [line] = reached(lambda: evaluate.main([HERE]))
    words = shlex.split(line.partition("; nearest: ")[2])
    assert words[4:] == [HERE, f"--config.{key}={PLANTED[key]}"]
    found, lines = reached(lambda: evaluate.main(words[4:]))
    assert found
    assert not lines


def test_a_run_of_the_user_s_own_reads_what_its_record_says_and_a_stranger_s_does_not(here, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", "state")
    text = (here / RUN / "config.json").read_text()
    config = from_json(text.replace(f"{RUN}/chat.jsonl", PLANTED["data.path"]))
    record(here / RUN, config, "", "")
    shutil.move(RUN, "moved")  # as a whole it stays the user's
    call = functools.partial(evaluate.main, ["--workdir=moved", "--config.data.tokenizer=planted/tokenizer"])
    found, lines = reached(call)
    assert found
    assert not lines
    plant(here / "moved" / "config.json", {"seed": 7})
    found, [line] = reached(call)
    assert found == []
    assert f"data.path: got '{PLANTED['data.path']}'" in line


def test_the_file_of_config_that_names_the_same_is_enough(here):
    plant(here / RUN / "config.json", {"data.chat_template": "planted/template.jinja"})
    added = 'config.data.chat_template = "planted/template.jinja"\n    return config'
    (here / "mine.py").write_text((here / "mine.py").read_text().replace("return config", added))
    _, lines = reached(lambda: harness.open_requests(RUN, "--config=mine.py"))
    assert not lines


@pytest.mark.parametrize("base", ["planted/model", "gs://stranger-bucket/x", "stranger/run/../../planted/run"])
def test_adapters_name_no_model_outside_of_their_folder(here, base):
    adapters = here / "stranger" / "adapters"
    adapters.mkdir()
    (adapters / "adapter_config.json").write_text(json.dumps({"r": 1, "lora_alpha": 1, foreign.BASE: base}))
    save_file({"a": np.zeros(1, np.float32)}, adapters / "adapter_model.safetensors")
    found, lines = reached(lambda: train.main([*MINE, "--workdir=new", f"--config.init_from={adapters}"]))
    assert found == []
    assert "--config.init_base=" in lines[0]
    named = f"--config.init_base={base}"
    found, _ = reached(lambda: train.main([*MINE, "--workdir=new", f"--config.init_from={adapters}", named]))
    assert bool(found) != base.startswith("gs:"), "a folder that the user names is read"


OF_FOLDERS = {
    "config.json": {"auto_map": {"AutoModelForCausalLM": "planted.module.function"}},
    "config.json, read over": {"_name_or_path": "planted/model", foreign.BASE: "planted/model", "auto_map": None},
    "tokenizer_config.json": {
        "tokenizer_file": "planted/tokenizer/tokenizer.json",
        "chat_template": "{% include 'planted/template.jinja' %}",
        "auto_map": {"AutoTokenizer": ["planted.module.function", None]},
    },
    "model.safetensors.index.json": {"weight_map": {"lm_head.weight": "../../planted/model/model.safetensors"}},
    "generation_config.json": {"custom_generate": "planted/module.py", "eos_token_id": 1},
}


@pytest.mark.parametrize("name", OF_FOLDERS)
def test_no_file_of_a_hugging_face_folder_names_what_is_outside(here, name):
    folder = here / "stranger" / "model"
    shutil.copytree(FIXTURES / "llama", folder)
    shutil.copytree(FIXTURES / "chat", folder, dirs_exist_ok=True)
    (folder / "chat_template.jinja").unlink()
    file = folder / name.partition(",")[0]
    content = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps(content | OF_FOLDERS[name]))
    if "index" in name:
        (folder / "model.safetensors").unlink()
    ignored = "--config.init_ignore=_name_or_path,base_model_name_or_path,auto_map"
    for call in (
        lambda: hugging_face.main(["config", "stranger/model", ignored]),
        lambda: hugging_face.main(["import", "stranger/model", "--to=imported", ignored]),
        lambda: train.main([*MINE, "--workdir=new", "--config.init_from=stranger/model", ignored]),
        lambda: generate.main(["--workdir=stranger/model", "--chat", "--prompt=a", "--num-tokens=1", ignored]),
    ):
        assert reached(call)[0] == []


def test_the_description_of_tokens_whose_tokenizer_is_beside_them_is_not_read(here):
    plant(here / RUN / "config.json", {"data.source": "tokens", "data.path": "planted/tokens.bin"})
    found, [line] = reached(COMMANDS["generate"][0])
    assert found == []
    assert "data.path: got 'planted/tokens.bin'" in line


def test_a_description_of_tokens_names_a_file_beside_it(here):
    tokens = here / "stranger" / "tokens" / "a.bin"
    tokens.parent.mkdir()
    tokens.write_bytes(b"")
    described = {"dtype": "uint16", "vocab_size": 2, "num_tokens": 0, "num_documents": 0, "end_id": 1}
    described |= {"end_token": "", "tokenizer_sha256": ""}
    for name in ("..", ".", "../tokenizer.json", "/etc/hostname"):
        (tokens.parent / "a.bin.json").write_text(json.dumps(described | {"tokenizer": name}))
        with pytest.raises(UserError, match="says tokenizer '"):
            read_sidecar(tokens)


def test_the_table_has_every_option_that_names_a_function_or_a_path():
    entries = flags.schema(Config())
    sources = [flags.schema(options_of(name)(), "data.") for name in names()]
    tasks_ = [flags.schema(tasks.find(name).options(), "model.") for name in tasks.names()]
    named = {key: entry for each in (entries, *sources, *tasks_) for key, entry in each.items() if entry.names}
    wanted = {key: (entry.names.partition(" ")[0], entry.default) for key, entry in named.items()}
    listed = {key: (field.kind, field.default) for key, field in FIELDS.items() if key != foreign.BASE}
    assert {key: kind for key, (kind, _) in listed.items()} == {key: kind for key, (kind, _) in wanted.items()}
    assert {key: row for key, row in listed.items() if row[0] == PATH} == {
        key: row for key, row in wanted.items() if row[0] == PATH
    }
    assert PLANTED.keys() == listed.keys()


def test_each_option_that_reads_a_url_is_in_the_table():
    assert {key for key in files.READ if "." in key or key.startswith("init")} <= FIELDS.keys()


INSIDE = ("", "run/a.txt", "run/a.txt:0.5", "run/a.txt,run/b.txt", "run/*/a.txt", "run", "~/run/a.txt")
OUTSIDE = (
    "a.txt", "run/../a.txt", "run/a.txt,b.txt", "run/a=/etc/passwd", "x=run/a.txt", "run/..:0.5", "../run/a.txt", "/",
    "~", "runs/a.txt", "run/a,../../b.txt", "gs://bucket/a.txt", " gs://bucket/a.txt", "run/a.txt,gs://bucket/a.txt",
    "x=gs://bucket/a.txt", "file:///etc/passwd", "https://host/a", "gs://run/a",
)  # fmt: skip


@pytest.mark.parametrize("path", [*INSIDE, *OUTSIDE])
def test_which_paths_are_inside(tmp_path, monkeypatch, path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    found = foreign.outside({"data": {"path": path}}, "run/config.json", (DATA,))
    assert found == ({} if path in INSIDE else {"data.path": path})


@pytest.mark.parametrize(
    ("path", "is_inside"),
    [("gs://b/run", True), ("gs://b/run/5", True), ("gs://b/runs", False), ("gs://b/run/../x", False), ("run", False)],
)
def test_which_addresses_are_inside_of_a_bucket(path, is_inside):
    found = foreign.outside({"checkpoint": {"directory": path}}, "gs://b/run", (WEIGHTS,))
    assert bool(found) != is_inside


def test_a_bucket_s_record_of_a_run_is_a_stranger_s_too(here, monkeypatch):
    content = json.loads((here / RUN / "config.json").read_text())
    content["data"]["tokenizer"] = "planted/tokenizer"
    monkeypatch.setattr(weights.other_runs, "extra_of_newest", lambda place: {"config": content})
    found, [line] = reached(lambda: evaluate.main(["--workdir=gs://mine/run"]))
    assert found == []
    assert line.startswith("gs://mine/run: data.path: got 'stranger/run/chat.jsonl', data.tokenizer: got ")


def test_the_own_option_of_a_task_that_names_a_path_is_checked_once_the_task_is_named(here):
    (here / "own.py").write_text(
        "import dataclasses\nfrom meshtrain.options import option\n\n@dataclasses.dataclass(frozen=True)\n"
        "class Options:\n    table: str = option('', 'a file', names='path')\n\ndef task(config, placement):\n"
        "    open(config.model.table)\n\ntask.options = Options\n"
    )
    config = json.loads((here / RUN / "config.json").read_text())
    config |= {"task": "own:task", "model": {"table": "planted/prompts.jsonl"}}
    (here / RUN / "config.json").write_text(json.dumps(config))
    found, [line] = reached(lambda: evaluate.main([HERE, "--config.task=own:task"]))
    assert found == []
    assert "model.table: got 'planted/prompts.jsonl'" in line
