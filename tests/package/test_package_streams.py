"""Every command with standard streams that are closed, as some daemons start programs."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

pytestmark = pytest.mark.quick

ROOT = pathlib.Path(__file__).parents[2]
# The commands that need no GPU compiler, one after the other in a program whose streams are closed.
SEVERAL = """
import json, pathlib, sys
from meshtrain.__main__ import main
from meshtrain.errors import run
folder = pathlib.Path(sys.argv[1])
text = folder / "text.txt"
text.write_text("some text " * 40)
small = ["--config.data.source=text", f"--config.data.path={text}",
         "--config.batch_size=2", "--config.sequence_length=8",
         "--config.model.num_layers=1", "--config.model.embed_dim=8", "--config.model.mlp_dim=8",
         "--config.model.num_heads=1", "--config.model.num_kv_heads=1", "--config.sample_tokens=0",
         "--config.num_eval_batches=1", "--config.observe.tensorboard=False", "--config.num_steps=2",
         "--config.learning_rate.warmup_steps=0"]
config = folder / "config.py"
config.write_text("from meshtrain.config.build import default\\ndef get_config(): return default()\\n")
of_run, named = [f"--workdir={folder / 'run'}"], [f"--config={config}", *small]
words = {
    "train": [*named, *of_run],
    "explain": named,
    "pipeline": ["--stages=2", "--microbatches=4"],
    "evaluate": of_run,
    "report": [str(folder / "run"), f"--html={folder / 'page.html'}"],
    "prepare": [f"--path={text}", f"--output={folder / 't.bin'}"],
    "verify": [str(folder / "run")],
    "hf": ["export", *of_run, f"--to={folder / 'exported'}"],
    "launch": ["--processes=1", "--", "-c", "pass"],
    "config": [],
}
codes = {}
def all_of_them():
    for name, given in words.items():
        codes[name] = []
        codes[name] = main([name, *given]) or 0
try:
    run(all_of_them)
finally:
    (folder / "codes.json").write_text(json.dumps(codes))
"""


def closed(streams, words, folder):
    """Returns the exit code of a Python program that a shell starts with these streams closed."""
    command = ["sh", "-c", f'exec "$@" {streams}', "sh", sys.executable, *words]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    return subprocess.run(command, cwd=folder, env={**environment, "PYTHONPATH": str(ROOT)}, check=False).returncode


# All commands start the same way: one imports JAX, one does not, and one starts other programs.
@pytest.mark.parametrize("command", ["train", "config", "launch"])
def test_a_command_ends_with_its_code_without_standard_error(command, tmp_path):
    assert closed("2>&-", ["-m", "meshtrain", command, "--no-such=1"], tmp_path) == 2


def test_commands_work_with_all_streams_closed(tmp_path):
    closed("<&- >&- 2>&-", ["-c", SEVERAL, str(tmp_path)], tmp_path)
    codes = json.loads((tmp_path / "codes.json").read_text())
    assert codes == dict.fromkeys(codes, 0)
    assert (tmp_path / "run" / "metrics.jsonl").stat().st_size
    assert len(codes) == 10


def test_a_file_does_not_get_the_descriptor_of_a_closed_stream(tmp_path):
    """What C++ code logs to descriptor 2 would be written into it; a program started then has the streams too."""
    code = (
        "import os, subprocess, sys\nfrom meshtrain.errors import run\n"
        "def main():\n    file = open('kept', 'w'); os.write(2, b'a line of a library'); assert file.fileno() > 2\n"
        "    return subprocess.run([sys.executable, '-c', 'import os; os.fstat(2)']).returncode\nrun(main)"
    )
    assert closed("<&- >&- 2>&-", ["-c", code], tmp_path) == 0
    assert (tmp_path / "kept").read_bytes() == b""
