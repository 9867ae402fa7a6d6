"""Each reader of JSON, headers and indexes in meshtrain/: a folder with valid files, and the function that reads it."""

import argparse
import dataclasses
import gzip
import json
import os
import pathlib
import shutil
import socket
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np

from meshtrain.checkpoint import other_runs, retention
from meshtrain.checkpoint.checkpoint import Checkpoints
from meshtrain.checkpoint.owner import OWNER, own_folder
from meshtrain.config.resolve import to_json
from meshtrain.config.schema import Config
from meshtrain.data import chat, chat_template, corpus, text
from meshtrain.data.encoding.tokenizer_folder import end_ids
from meshtrain.data.sources import DataOptions, DataRequest
from meshtrain.data.tokenizer import file_tokenizer, with_begin_token
from meshtrain.errors import Problems, refuse
from meshtrain.examples import idx, preferences
from meshtrain.generation import prompts
from meshtrain.hardware import links
from meshtrain.hf import adapters, export, tensor_files
from meshtrain.hf import folder as hf_folder
from meshtrain.launch import rendezvous
from meshtrain.observe import trackers
from meshtrain.plan.timing.streams import measured_seconds
from meshtrain.report.runs import open_runs
from meshtrain.run import existing_run, weights, workdir
from tests.messages import test_messages_files as files
from tests.messages.desk import TOKENS
from tests.report.folders import folder as run_folder

FIXTURES = pathlib.Path(__file__).parents[1] / "hf" / "fixtures"


@dataclasses.dataclass(frozen=True)
class Reader:
    """A reader, and what it reads.

    Attributes:
      name: of the files.
      functions: `path below meshtrain/:function` of those that open or decode them.
      files: name in the folder -> its kind, see `scripts.benchmarks.readers.changed`; these are changed.
      write: writes the folder's valid files.
      use: a function of the program that reads the folder, which passes with the valid files.
    """

    name: str
    functions: tuple[str, ...]
    files: Mapping[str, str]
    write: Callable[[pathlib.Path], object]
    use: Callable[[pathlib.Path], object]


def written(content):
    """A function that writes files into a folder: name -> content."""

    def write(folder):
        for name, one in content.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(one.encode() if isinstance(one, str) else one)

    return write


def copied(name, also=None):
    """A function that copies a Hugging Face folder of the fixtures, and writes other files beside it."""

    def write(folder):
        for path in (FIXTURES / name).iterdir():
            shutil.copyfile(path, folder / path.name)
        written(also or {})(folder)

    return write


def read_lines(read):
    """A function that gives a reader of lines one file, and refuses with the problems that it adds."""

    def use(folder):
        problems = Problems()
        found = read(next(folder.iterdir()), problems)
        list(found)
        refuse(problems.lines())

    return use


def opened_corpus(options):
    """A function that opens data as a run does: the options may name files of the folder."""
    asked = DataRequest({}, {}, 16, 400, 0)
    return lambda folder: (
        corpus.open_corpus(dataclasses.replace(options, path=str(folder / options.path)), asked).fingerprint
    )


def of_a_run(folder):
    """Writes the folder of a run: configuration, metrics, facts, and what a report reads."""
    run_folder(folder / "run", sample="a sample")
    configuration = to_json(Config())
    (folder / "run" / "config.json").write_text(configuration)
    (folder / "run" / "corpus.json").write_text('{"begun_seconds": 1e9, "bigram_loss_on_16": 2.5, "fingerprint": "0"}')
    (folder / "run" / "samples.jsonl").write_text('{"step": 10, "prompt": "a", "text": "b"}\n')


def continued(folder):
    """Does what a run does with its own folder when it goes on, and what `generate` does with its config.json."""
    run = folder / "run"
    refuse(workdir.check(run, Config(), is_saved=False))
    workdir.refuse_other_corpus(run, "0")
    workdir.start_seconds(run, 1.0, 1.0)
    refuse(trackers.check(run))
    trackers.metrics_of_evaluation(run, 40)
    trackers.keep_rows_up_to(run / "metrics.jsonl", 20)
    other_runs.place_of(run)
    arguments = argparse.Namespace(workdir=run, config=None, overrides={}, problems=[], command=[])
    existing_run.configuration(arguments, [], reads_data=False)


def reported(folder):
    """Reads what a page shows of a run; the page itself takes 0.4 seconds."""
    refuse(open_runs([str(folder / "run")])[1])


STATE = {"step": jnp.int32(5), "params": {"w": jnp.ones((2, 2))}}


def saved(folder):
    """Writes a checkpoint with ratings."""
    with Checkpoints(folder / "checkpoints", retention.CheckpointOptions(keep_best=1)) as checkpoints:
        checkpoints.save(5, STATE, {"config": {"seed": 0}})
        checkpoints.wait()
        checkpoints.rate(5, {"eval_loss": 2.0})


def restored(folder):
    """Compares and reads the weights of a checkpoint as `init_from` does."""
    other_runs.extra_of_newest(folder / "checkpoints")
    shapes = {"w": jax.ShapeDtypeStruct((2, 2), jnp.float32)}
    with other_runs.find(folder) as checkpoints:
        checkpoints.refuse_other_params(5, shapes)
        checkpoints.refuse_damaged(5)
    retention.read_ratings(folder / "checkpoints")


def taken_over(folder):
    with own_folder(folder, "mine"):
        pass


def tokenized(folder):
    tokenizer = file_tokenizer(str(folder))
    tokenizer.encode_documents(["a b"])
    tokenizer.decode([0, 1])
    with_begin_token(str(folder), "a")


def with_adapters(folder):
    config = dataclasses.replace(Config(), init_from=str(folder))
    adapters.open_adapters(folder)
    weights.base_weights(config)


ROWS = "".join(json.dumps({"text": "some words", "id": number, "more": [None, {}]}) + "\n" for number in range(3))
TURNS = [{"role": "user", "content": "a"}, {"role": "assistant", "content": [{"type": "text", "text": "b"}]}]
TALKS = json.dumps({"messages": TURNS}) + "\n" + json.dumps({"prompt": "a", "completion": "b"})
PAIRS = json.dumps({"prompt": "a", "chosen": "b", "rejected": "c"}) + "\n"
SETTINGS = {"eos_token": {"content": "b"}, "bos_token": "a", "chat_template": "{{ messages }}", "add_bos_token": True}
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"
BIN_JSON = json.dumps(TOKENS | {"num_tokens": 400})
LINKS = links.to_json(links.Links("cpu", (links.Link("data", "all-reduce", 2, 1, 1e-5, 1e9),)))
TOKEN_DATA = DataOptions(source="tokens", path="ids.bin", packing="first_fit")
ADAPTERS = {
    "r": 2, "lora_alpha": 3, "rank_pattern": {"a": 2},
    "alpha_pattern": {}, "use_rslora": False, "bias": "none", "modules_to_save": None, "target_modules": ["c_attn"],
}  # fmt: skip


def of_adapters(folder):
    pairs = {f"transformer.h.0.attn.c_attn.lora_{end}": shape for end, shape in (("A", (2, 32)), ("B", (96, 2)))}
    keys = {f"base_model.model.{name}.weight": shape for name, shape in pairs.items()}
    export.write_file(folder / adapters.WEIGHTS_FILE, keys, map(np.zeros, keys.values()), "float32")
    (folder / "base").mkdir()
    (folder / "adapter_config.json").write_text(
        json.dumps({"base_model_name_or_path": str(folder / "base"), **ADAPTERS})
    )


def of_tokens(folder):
    written({"ids.bin": bytes(800), "ids.bin.json": BIN_JSON})(folder)
    os.utime(folder / "ids.bin", (0, 0))
    opened_corpus(TOKEN_DATA)(folder)


def scanned(folder):
    """Reads the ids themselves: without an index, which would be of another file."""
    (folder / "ids.bin.index").unlink(missing_ok=True)
    os.utime(folder / "ids.bin", (0, 0))
    opened_corpus(TOKEN_DATA)(folder)


def of_images(folder):
    written({"a-images-idx3-ubyte": files.PIXELS, "a-labels-idx1-ubyte": files.LABELS})(folder)


def received(folder):
    """Sends the file to the reader of the messages between the processes of a job."""
    here, there = socket.socketpair()
    with here, there:
        there.sendall((folder / "message").read_bytes()[:4096])
        there.shutdown(socket.SHUT_WR)
        rendezvous._Connection(here, rendezvous.Meeting("localhost:1", 2, 1), "").read()


READERS = (
    Reader(
        "a run's folder",
        (
            "config/resume.py:from_json",
            "run/existing_run.py:configuration",
            "run/existing_run.py:_change",
            "run/workdir.py:_facts",
            "run/workdir.py:check",
            "run/workdir.py:_read_json",
            "checkpoint/other_runs.py:place_of",
            "observe/run_files.py:row_of",
            "observe/trackers.py:check",
            "observe/trackers.py:metrics_of_evaluation",
            "observe/trackers.py:keep_rows_up_to",
        ),
        {"run/config.json": "json", "run/corpus.json": "json", "run/metrics.jsonl": "lines"},
        of_a_run,
        continued,
    ),
    Reader(
        "a run in a report",
        ("report/runs.py:_run", "report/runs.py:_json", "report/logs.py:read"),
        {f"run/{name}": "json" for name in ("config.json", "device.json")}
        | {f"run/{name}": "lines" for name in ("metrics.jsonl", "samples.jsonl")},
        of_a_run,
        reported,
    ),
    Reader(
        "metrics.jsonl as a measurement",
        ("plan/timing/streams.py:_from_log",),
        {"metrics.jsonl": "lines"},
        written({"metrics.jsonl": '{"step": 1, "step_seconds": 0.5}\n{"step": 2, "step_seconds": 0.25}\n'}),
        lambda folder: measured_seconds(str(folder / "metrics.jsonl")),
    ),
    Reader(
        "config.json of a Hugging Face folder",
        ("hf/config_json.py:_load",),
        {"config.json": "json"},
        copied("llama"),
        hf_folder.open_folder,
    ),
    Reader(
        "adapter_config.json",
        ("hf/adapters.py:open_adapters", "run/weights.py:base_weights"),
        {"adapter_config.json": "json"},
        of_adapters,
        with_adapters,
    ),
    Reader(
        "safetensors",
        ("hf/tensor_files.py:_header", "hf/tensor_files.py:open_tensors", "hf/tensor_files.py:content_hash"),
        {"model.safetensors": "safetensors"},
        copied("llama"),
        lambda folder: tensor_files.content_hash(hf_folder.open_folder(folder).stored),
    ),
    Reader(
        "the index of safetensors",
        ("hf/tensor_files.py:_index",),
        {"model.safetensors.index.json": "json"},
        copied("llama-bf16-sharded"),
        hf_folder.open_folder,
    ),
    Reader(
        "tokenizer.json",
        (
            "data/tokenizer.py:_load",
            "data/tokenizer.py:with_begin_token",
            "data/long_texts.py:cuts_of",
            "data/encoding/special_tokens.py:mark_tokenizer",
            "data/encoding/text_bytes.py:bytes_of_ids",
            "run/weights.py:has_same_vocabulary",
        ),
        {"tokenizer.json": "json"},
        written({"tokenizer.json": json.dumps(files.WORDS)}),
        tokenized,
    ),
    Reader(
        "the settings beside a tokenizer.json",
        ("data/encoding/tokenizer_folder.py:read_tokenizer_json", "data/chat_template.py:template_text"),
        {"tokenizer_config.json": "json", "generation_config.json": "json"},
        written(
            {
                "tokenizer.json": json.dumps(files.WORDS),
                "tokenizer_config.json": json.dumps(SETTINGS),
                "generation_config.json": '{"eos_token_id": [1, 2]}',
            }
        ),
        lambda folder: (
            chat_template.open_template(str(folder), ""),
            file_tokenizer(str(folder)),
            end_ids(str(folder)),
        ),
    ),
    Reader(
        "a chat template",
        ("data/chat_template.py:template_text",),
        {"chat_template.jinja": "bytes"},
        written({"tokenizer.json": json.dumps(files.WORDS), "chat_template.jinja": TEMPLATE}),
        lambda folder: chat_template.open_template(str(folder), ""),
    ),
    Reader(
        "the description of a token file",
        ("data/token_files.py:read_description", "data/token_files.py:is_intact"),
        {"ids.bin.json": "json"},
        of_tokens,
        opened_corpus(TOKEN_DATA),
    ),
    Reader(
        "the index of a token file",
        ("data/token_files.py:read_index",),
        {"ids.bin.index": "head"},
        of_tokens,
        opened_corpus(TOKEN_DATA),
    ),
    Reader(
        "a token file",
        ("data/token_files.py:_chunks", "data/token_files.py:OpenFile.read"),
        {"ids.bin": "bytes"},
        of_tokens,
        scanned,
    ),
    *(
        Reader(
            f"documents in {ending}",
            (
                "data/text.py:_can_read",
                "data/text.py:open_documents",
                "data/text.py:_parquet_rows",
                "data/text.py:_row_text",
            ),
            {f"a{ending}": kind},
            written({f"a{ending}": content}),
            read_lines(lambda path, problems: text.read_documents(path, "text", problems)),
        )
        for ending, kind, content in (
            (".jsonl", "lines", ROWS),
            (".jsonl.gz", "bytes", gzip.compress(ROWS.encode(), mtime=0)),
            (".jsonl.zst", "bytes", files.zst(ROWS.encode())),
            (".parquet", "bytes", files.parquet()),
        )
    ),
    Reader(
        "conversations",
        ("data/chat_lines.py:fields_of",),
        {"a.jsonl": "lines"},
        written({"a.jsonl": TALKS}),
        read_lines(chat.read_lines),
    ),
    Reader(
        "preferences",
        ("data/chat_lines.py:fields_of",),
        {"a.jsonl": "lines"},
        written({"a.jsonl": PAIRS}),
        read_lines(lambda path, problems: preferences.read_pairs([path], problems)),
    ),
    Reader(
        "prompts",
        ("generation/prompts.py:from_file", "generation/prompts.py:_of_line"),
        {"a.jsonl": "lines"},
        written({"a.jsonl": json.dumps({"prompt": "a"}) + "\n" + json.dumps({"messages": TURNS[:1]})}),
        read_lines(lambda path, problems: prompts.from_file(str(path), problems, chat=True)),
    ),
    Reader(
        "images",
        tuple(f"examples/idx.py:{name}" for name in ("header", "read", "_open", "_is_compressed", "_wrong_beginning")),
        {"a-images-idx3-ubyte": "bytes", "a-labels-idx1-ubyte": "bytes"},
        of_images,
        lambda folder: idx.read_pairs([folder / "a-images-idx3-ubyte"], "data.path"),
    ),
    Reader(
        "measured links",
        ("hardware/links.py:read",),
        {"links.json": "json"},
        written({"links.json": json.dumps(LINKS)}),
        lambda folder: links.read(str(folder / "links.json")),
    ),
    Reader(
        "a checkpoint",
        (
            "checkpoint/integrity.py:_read",
            "checkpoint/integrity.py:_sha256",
            "checkpoint/integrity.py:unreadable",
            "checkpoint/other_runs.py:extra_of_newest",
            "checkpoint/other_runs.py:newest",
            "checkpoint/retention.py:read_ratings",
            "checkpoint/checkpoint.py:Checkpoints._array_metadata",
            "checkpoint/checkpoint.py:Checkpoints._read",
            "checkpoint/manager.py:renaming_problems",
        ),
        {
            f"checkpoints/{name}": "json"
            for name in (
                "ratings.json",
                "5/manifest.json",
                "5/_CHECKPOINT_METADATA",
                "5/state/_METADATA",
                "5/state/_sharding",
                "5/extra/metadata",
            )
        },
        saved,
        restored,
    ),
    Reader(
        "the owner of a folder",
        ("checkpoint/owner.py:_owner", "store/buckets.py:read"),
        {OWNER: "json"},
        written({OWNER: json.dumps({"run": "mine", "host": "process 3 on a", "seconds": 1.0})}),
        taken_over,
    ),
    Reader(
        "a message between processes",
        ("launch/rendezvous.py:_Connection.read",),
        {"message": "json"},
        written({"message": '{"process": 1, "num_processes": 2, "name": "a", "value": [1]}'}),
        received,
    ),
)

# Functions that read something else than content that others may have changed, or that another check has read: why.
ELSEWHERE = {
    "agree/record.py:read": "tests/agree/test_agree_record.py damages records",
    "agree/record.py:write": "encodes the record's own text",
    "agree/sides.py:nudged": "decodes a hash of its own",
    "cli/flags.py:load": "a configuration is a program: Python's own errors are reported with its line",
    "config/__main__.py:copy": "copies a file of the package",
    "data/prepare.py:prepare": "the bytes of a tokenizer.json are hashed and copied",
    "data/prepare.py:_restore_copy": "compares the bytes of a copy of the tokenizer.json",
    "data/text.py:share": "decodes a hash of its own",
    "data/text.py:standard_library": "the source of Python; what is not UTF-8 is left out",
    "data/token_files.py:token_file_tokenizer": "hashes the bytes of a tokenizer.json",
    "data/tokenizer.py:byte_tokenizer.encode_documents": "encodes texts that are read already",
    "checkpoint/owner.py:_machine": "the kernel's",
    "checkpoint/owner.py:_stat": "the kernel's",
    "launch/distributed.py:take_memory": "the kernel's",
    "launch/host_memory.py:_text": "the kernel's",
    "launch/peers.py:Exchange._publish": "what this program's other processes have sent",
    "launch/peers.py:_wait_for": "what this program's other processes have sent",
    "launch/peers.py:endings": "what this program's other processes have sent",
    "plan/scheduled_hlo.py:_schedule": "what the compiler has just written",
    "plan/cluster/clusters.py:open_cluster": "a file of the package",
    "probe/checks/machine_facts.py:_text": "the kernel's",
    "files.py:hash_of_sources": "hashes the package",
    "files.py:pointer_problem": "compares the first bytes",
    "files.py:read_json": "every reader in the table uses it",
    "generate.py:_prompts": "calls `generation/prompts.py:from_file`",
    "run/generating.py:sample_texts": "calls `generation/prompts.py:from_file`",
    "run/dataset.py:open_data": "calls the source's function",
    "run/initial_state.py:_as_today": "calls `Checkpoints.restore`",
    "run/workdir.py:warn_of_another_rate": "config.json, after `workdir.check` has compared it",
    "run/exporting.py:with_text_source": "compares the bytes of two files",
    "hugging_face.py:_import": "config.json, after `config_json.describe_model` has read it",
    "run/exporting.py:text_files": "tokenizer.json, after `file_tokenizer` has read it",
    "run/workdir.py:lock": "a line about the process that has the folder, shown in an error",
    "observe/trackers.py:WandB.__init__": "config.json, which the run has just written",
    "observe/trackers.py:WandB._id": "a line; what cannot be decoded is refused there",
}
