"""One small model on one small text, trained by the program's own entry points; each run is made once."""

import contextlib
import dataclasses
import functools
import io
import json
import pathlib
import shutil
import signal
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from meshtrain import training
from meshtrain.errors import Interrupted
from meshtrain.main import main
from meshtrain.run import session

NUM_STEPS, STOPPED_AT = 10, 5

CONFIG = """
from meshtrain.config.build import default

def get_config():
    config = default()
    config.num_steps = NUM_STEPS
    config.batch_size = 8
    config.sequence_length = 32
    config.log_every = 1
    config.eval_every = 4
    config.num_eval_batches = 2
    config.sample_tokens = 0
    config.model.num_layers = 4
    config.model.embed_dim = 32
    config.model.mlp_dim = 64
    config.model.num_heads = config.model.num_kv_heads = 4
    config.model.dropout_rate = 0.1
    config.pipeline.num_microbatches = 2
    config.learning_rate.peak = 3e-3
    config.learning_rate.warmup_steps = 2
    config.data.source = "text"
    config.data.path = "CORPUS"
    config.data.num_threads = 0
    return config
"""


@dataclasses.dataclass(frozen=True)
class Ran:
    """What a run leaves: its result, what it printed, its folder."""

    result: Any
    output: str
    directory: pathlib.Path

    @property
    def rows(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.directory / "metrics.jsonl").read_text().splitlines()]

    @property
    def losses(self) -> dict[int, float]:
        return {row["step"]: row["loss"] for row in self.rows if "loss" in row}


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    path = tmp_path_factory.mktemp("corpus") / "words.txt"
    path.write_text("".join(f"def f{i % 7}(x):\n    return x + {i * i % 13}\n" for i in range(500)))
    return path


@pytest.fixture(scope="session")
def config_file(corpus: pathlib.Path) -> pathlib.Path:
    path = corpus.with_name("words.py")
    path.write_text(CONFIG.replace("NUM_STEPS", str(NUM_STEPS)).replace("CORPUS", str(corpus)))
    return path


@pytest.fixture(scope="session")
def command(config_file: pathlib.Path) -> Callable[..., list[str]]:
    """A function (directory, changes) -> the words of a command line."""

    def words(directory: pathlib.Path, *changes: str) -> list[str]:
        return [f"--config={config_file}", f"--workdir={directory}", *(f"--config.{change}" for change in changes)]

    return words


@pytest.fixture(scope="session")
def run(command: Callable[..., list[str]]) -> Callable[..., Ran]:
    """A function (directory, changes) -> Ran that trains through `main`."""

    def trained(directory: pathlib.Path, *changes: str) -> Ran:
        kept: list[Any] = []
        output = io.StringIO()
        remember = patched(
            training, "train_resolved", lambda original: lambda *given, **named: kept.append(original(*given, **named))
        )
        with remember, contextlib.redirect_stdout(output):
            assert main(command(directory, *changes)) == 0
        return Ran(kept[0], output.getvalue(), directory)

    return trained


@contextlib.contextmanager
def patched(module: types.ModuleType, name: str, wrapper: Callable[[Any], Any]) -> Iterator[None]:
    """Wraps a function that a module calls for as long as the block lasts."""
    original = getattr(module, name)
    setattr(module, name, wrapper(original))
    try:
        yield
    finally:
        setattr(module, name, original)


@pytest.fixture(scope="session")
def straight(run: Callable[..., Ran], tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """Ten steps without a stop."""
    return run(tmp_path_factory.mktemp("straight") / "run", "mesh.fsdp=2", "sample_tokens=160")


@pytest.fixture(scope="session")
def stopped(command: Callable[..., list[str]], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., pathlib.Path]:
    """A function (changes) -> a fresh copy of a run that a SIGTERM has ended after five of its ten steps."""

    def signalling(original: Callable[..., Any]) -> Callable[..., Any]:
        def evaluate(*given: Any) -> Any:
            signal.raise_signal(signal.SIGTERM)  # after step 4: the loop notices once step 5 is done
            return original(*given)

        return evaluate

    @functools.cache
    def made(changes: tuple[str, ...]) -> pathlib.Path:
        directory = tmp_path_factory.mktemp("stopped") / "run"
        said = pytest.raises(Interrupted, match=f"saved at step {STOPPED_AT} of {NUM_STEPS}")
        with patched(session, "evaluate_with_texts", signalling), said, contextlib.redirect_stdout(io.StringIO()):
            main(command(directory, *changes))
        return directory

    def copy(*changes: str) -> pathlib.Path:
        return shutil.copytree(made(changes), tmp_path_factory.mktemp("copy") / "run")

    return copy
