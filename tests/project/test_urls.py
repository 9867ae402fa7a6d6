"""A URL is refused wherever a path on this machine is read: every path of the configuration and every argument.

Where checkpoints are read or written, and text is read, a bucket of `gs://` is taken and every other URL refused.
"""

import argparse
import contextlib
import os

import pytest

from meshtrain import files, training
from meshtrain.__main__ import COMMANDS, main
from meshtrain.cli import flags
from meshtrain.config import Config, data_sources, resolve, tasks
from meshtrain.errors import UserError

pytestmark = pytest.mark.quick

URL = "gs://bucket/one"
LINE = f"got '{URL}', a URL; allowed: a path on this machine; nearest: mount or copy it"
S3 = "s3://bucket/one"
S3_LINE = f"got '{S3}', a URL; allowed: a path on this machine, gs://; nearest: s3fs BUCKET /mnt/BUCKET, then the path "
S3_LINE += "in that folder"
TAKE_BUCKETS = {
    *("init_from", "checkpoint.directory", "data.path", "data.validation_path", "prepare --path"),
    *("evaluate --workdir", "generate --workdir", "hf --workdir", "verify DIR"),
}
# Texts that are no paths. A new text stands here, or the metavar of its argument says FILE, DIR or RUN.
TEXTS = {
    "--mesh",
    "--forward",
    "--backward",
    "--transfer",
    *("--cluster", "--copy", "--search", "--search-compiles", "--scaling", "--programs", "--schedule"),
    *(
        "--prompt",
        "--stop",
        "--end_token",
        "--begin_token",
        "--special_tokens",
        "--text_field",
        "--dtype",
        "--weights",
        "--ignore",
        "action",
    ),
    *("--smallest", "--largest", "--limit", "--copy", "--config.GROUP.FIELD"),
}
FIELDS = {
    "data.text_field",
    "data.end_token",
    "data.begin_token",
    "profile.steps",
    "optimizer.trainable",
    "lora.targets",
}
FIELDS |= {"checkpoint.best_metric", "early_stop.metric", "init_ignore"}
# What a command needs besides, so that the URL is its only mistake.
NEEDED = {
    "train": ["--config=tiny.py"],
    "plan": ["--cluster=cpu:8"],
    "prepare": ["--path=a.txt", "--output=b.bin"],
    "hf": ["--to=new", "import"],
}


def parser_of(command):
    """Returns the whole parser of a command, which prints its help."""
    found = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(argparse.ArgumentParser, "print_help", lambda self, file=None: found.append(self))
        with contextlib.suppress(SystemExit):
            main([command, "--help"])
    return found[0]


def arguments_of(command):
    """Returns (the last of an argument's names, whether it is a path) for each one that takes a text."""
    listed = []
    for action in parser_of(command)._actions:
        if action.nargs != 0 and action.type in (None, str) and not isinstance(action.default, int):
            name = [action.metavar or action.dest, *action.option_strings][-1]
            listed.append((name, str(action.metavar).startswith(("FILE", "DIR", "RUN"))))
    return listed


def test_every_text_of_a_command_line_is_a_path_or_known_to_be_none():
    arguments = {argument for command in COMMANDS for argument in arguments_of(command)}
    assert {name for name, is_path in arguments if not is_path} == TEXTS


@pytest.mark.parametrize("command", sorted(COMMANDS.keys() - {"launch"}))  # which has no path
def test_an_argument_that_is_a_path_refuses_a_url(tmp_path, monkeypatch, command):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.py").write_text("def get_config():\n    return {}\n")
    needed, said, lines = NEEDED[command] if command in NEEDED else [], {}, {}
    for name in (name for name, is_path in arguments_of(command) if is_path):
        url, line = (S3, S3_LINE) if f"{command} {name}" in TAKE_BUCKETS else (URL, LINE)
        words, lines[name] = [url] if name in ("DIR", "RUN") else [f"{name}={url}"], [f"{name}: {line}"]
        with pytest.raises(UserError) as caught:
            main([command, *needed, *words])
        said[name] = [line for line in caught.value.problems if line.startswith(f"{name}: ")]
    assert said
    assert said == lines
    assert os.listdir() == ["tiny.py"]


def fields():
    """Returns dotted key -> entry of every text of the configuration, with the options of every task and source."""
    found = {}
    for name in tasks.names():
        found |= flags.schema(Config(task=name, model=tasks.find(name).options()))
    for name in data_sources.names():
        found |= flags.schema(Config(data=data_sources.find(name).options()))
    return {key: entry for key, entry in found.items() if entry.kind is str and not entry.choices}


def test_every_text_of_the_configuration_is_a_path_a_function_or_known_to_be_none():
    assert {key for key, entry in fields().items() if not entry.names} == FIELDS


@pytest.mark.parametrize("key", [key for key, entry in fields().items() if entry.names == "path"])
@pytest.mark.parametrize("reads_data", [True, False])
def test_a_field_that_is_a_path_refuses_a_url(key, reads_data):
    url, line = (S3, S3_LINE) if key in TAKE_BUCKETS else (URL, LINE)
    with pytest.raises(UserError) as caught:
        resolve({}, {key: url, "seed": "-1"}, ["--flag: another problem"], reads_data=reads_data)
    assert set(caught.value.problems) == {
        "--flag: another problem",
        "seed: got -1; allowed: at least 0; nearest: 0",
        f"{key}: {line}",
    }


def test_a_data_function_of_the_user_s_reads_what_it_likes():
    options = {"data.source": "docs.guide.own_images:make_data", "data.path": URL, "data.validation_path": URL}
    assert resolve({}, options | {"model.vocab_size": "257"}, reads_data=False).data.path == URL


@pytest.mark.parametrize("source", ["tokens", "idx"])
@pytest.mark.parametrize("reads_data", [True, False])
def test_a_source_that_maps_or_opens_files_refuses_a_bucket(source, reads_data):
    task = {"task": "convnet"} if source == "idx" else {"model.vocab_size": "257"}
    options = task | {"data.source": source, "data.path": URL, "data.validation_path": URL}
    with pytest.raises(UserError) as caught:
        resolve({}, options, reads_data=reads_data)
    assert caught.value.problems == (f"data.path: {LINE}", f"data.validation_path: {LINE}")


@pytest.mark.parametrize("directory", [URL, "file:///tmp/run", "S3://bucket/run", " gs://bucket/run"])
def test_a_run_s_folder_given_in_python_is_no_url(tmp_path, monkeypatch, directory):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=f"directory: got '{directory}', a URL"):
        training.train({}, directory)
    assert os.listdir() == []


@pytest.mark.parametrize("path", ["runs/a:b", "/tmp/x://y", "C:/x", "a b://c", "://x", "1x://y", "gs:/one"])
def test_other_names_with_colons_are_paths(path):
    assert files.url_problems("--workdir", path) == []


def test_one_of_several_paths_is_enough():
    assert len(files.url_problems("data.tokenizer", f"a.txt, {URL}/*.txt,b.txt")) == 1
    assert len(files.url_problems("data.path", f"a.txt, {URL}/*.txt,{S3}")) == 1


def test_a_scheme_that_a_place_reads_is_one_entry():
    assert files.READ.keys() == TAKE_BUCKETS
    assert files.url_problems("init_from", URL) == []
    assert files.url_problems("--workdir", URL, "verify") == [f"--workdir: {LINE}"]
    assert [len(files.url_problems("init_from", url)) for url in ("GS://bucket/one", " gs://bucket/one")] == [1, 1]
    assert files.url_problems("data.tokenizer", URL) == [f"data.tokenizer: {LINE}"]
    assert "allowed: a path on this machine, gs://;" in files.url_problems("init_from", "s3://bucket/one")[0]
