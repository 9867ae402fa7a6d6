"""docs/guide/finetuning.md: its example is what scripts/bench finetune runs, on questions that no run has seen."""

import contextlib
import importlib
import json
import pathlib
import re
import shutil

import pytest

from meshtrain.config.schema import Config
from meshtrain.data.text import share
from meshtrain.errors import UserError
from scripts.benchmarks import docstring_questions, finetune
from scripts.benchmarks.docstring_questions import Asked, functions, line, split
from scripts.benchmarks.finetune import commands, performed, shown

ROOT = pathlib.Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "guide" / "finetuning.md").read_text(encoding="utf-8")
SOURCE = '''
class Stack:
    def push(self, item, /, *more: int, last=None) -> None:
        """  Puts items on top.

        More of it.
        """
    def pop(self): return 1
async def wait(): "Waits."
'''


def test_functions_with_a_docstring_are_asked_for_by_name_and_signature():
    assert functions("a.py", SOURCE) == [
        Asked("a.py", "wait()", "Waits."),
        Asked("a.py", "push(self, item, /, *more: int, last=None)", "Puts items on top."),
    ]
    assert functions("b.py", "def broken(:") == []


def test_no_answer_is_in_both_parts():
    paths = [f"{number}.py" for number in range(200)]
    held = next(path for path in paths if share(path) < Config().data.validation_fraction)
    seen = next(path for path in paths if share(path) >= Config().data.validation_fraction)
    asked = [Asked(held, "f()", "Returns the same."), Asked(held, "g()", "Returns another."),
             Asked(seen, "h()", "Returns the same."), Asked(seen, "i()", "Returns the same."),
             Asked(seen, "j()", "Goes on in the next"), Asked(seen, "k()", "Is longer than fits. " * 6)]  # fmt: skip
    assert split(asked) == ([asked[2]], [asked[1]])
    assert json.loads(line(asked[2]))["messages"][1] == {"role": "assistant", "content": "Returns the same."}


def test_the_page_shows_the_commands_of_the_script():
    typed = [text for text in re.sub(r" \\\n +", " ", PAGE).splitlines() if text.startswith("$ python -m ")]
    wanted = [shown(words) for words in commands(finetune.FOLDER)]
    assert [text for text in typed if finetune.FOLDER in text] == wanted


def test_what_cannot_run_is_said(tmp_path):
    with pytest.raises(RuntimeError, match=r"meshtrain nothing ended with 2:\n.*command: got 'nothing'"):
        performed(["meshtrain", "nothing"])
    with pytest.raises(UserError, match=r"--to: got '.*', a folder; allowed: a new folder; nearest: --to=.*-again"):
        finetune.main([f"--to={tmp_path}"])
    with pytest.raises(UserError, match=r"folder: got '.*none', nothing there; allowed: a folder; nearest: mkdir"):
        docstring_questions.main([f"{tmp_path}/none"])


def in_this_process(words, capsys):
    """Does what `performed` does, without another start of Python and JAX."""
    module, *rest = words[: words.index(">")] if ">" in words else words
    main = importlib.import_module("meshtrain.__main__" if module == "meshtrain" else module).main
    assert main(rest) == 0
    text = capsys.readouterr().out
    if ">" in words:
        pathlib.Path(words[-1]).write_text(text)
    return text


@pytest.mark.slow
def test_three_steps_of_the_example(tmp_path, capsys):
    base = ["--config.model.num_layers=1", "--config.model.embed_dim=32", "--config.model.mlp_dim=64",
            "--config.num_steps=3", "--config.num_eval_batches=1", "--config.sample_tokens=4"]  # fmt: skip
    folder = str(tmp_path / "example")
    pathlib.Path(folder).mkdir()
    with contextlib.chdir(ROOT):
        said = [in_this_process(words, capsys) for words in commands(folder, base, base[3:])]
    assert re.fullmatch(r"([\d,]+) questions in .*\n([\d,]+) questions in .*\n", said[0])
    names = {path.name for path in (tmp_path / "example" / "model").iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja"} <= names
    assert f"from {folder}/model" in said[6]
    losses = [re.search(r"held_out\S* +([\d.]+)", said[number]).group(1) for number in (3, 7, 10)]
    assert float(losses[1]) < float(losses[0])
    assert losses[2] == losses[1], "merged into the matrices, the adapters do the same"
    assert said[4].count("--- prompt") == said[8].count("--- prompt") == len(finetune.PROMPTS)
    shutil.rmtree(folder)
