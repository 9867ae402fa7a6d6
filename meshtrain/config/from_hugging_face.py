"""The configuration of a Hugging Face folder, and the configuration file that says the same."""

import dataclasses
from pathlib import Path

from meshtrain.cli import flags
from meshtrain.config.config import Config
from meshtrain.data.sources import DataOptions
from meshtrain.files import expanded, what_is_at
from meshtrain.hf.config_json import described
from meshtrain.optim.learning_rate import LearningRateOptions
from meshtrain.sharding.rules import AXES
from meshtrain.step.precision import PrecisionOptions

TOKENIZER_FILE = "tokenizer.json"
LONGEST, BATCH_SIZE = 1024, 8  # of a run before the user has edited it; longest in tokens
_SHOWN = ("num_steps", *(f"mesh.{axis}" for axis in AXES))  # also where they have their defaults
_FILE = '''\
"""A {family} of {num_layers} layers, from {directory}.

The mesh and the data are examples. Files of one's own: data.source = "text" and data.path.
"""

from meshtrain.config import default


def get_config():
    config = default()
{lines}
    return config
'''


def of_folder(directory: str | Path, ignore: str = "") -> Config:
    """Returns a configuration, not resolved, whose model is that of a Hugging Face folder; reads config.json alone.

    Text is read with the folder's tokenizer and chat template. Without a tokenizer.json, text is token ids, written as
    numbers. `ignore` becomes `init_ignore`.

    Raises:
      UserError: one line for each key of config.json that is missing, wrong or not understood.
    """
    folder = expanded(directory).absolute()
    folder_content = described(folder, ignore)
    has_tokenizer = what_is_at(folder / TOKENIZER_FILE) == "a file"
    policy = "bfloat16" if folder_content.dtype == "bfloat16" else PrecisionOptions.policy  # others: in float32
    return Config(
        model=folder_content.options,
        sequence_length=min(folder_content.max_length or LONGEST, LONGEST),
        batch_size=BATCH_SIZE,
        init_ignore=ignore,
        learning_rate=LearningRateOptions(warmup_steps=Config.num_steps // 10),
        precision=PrecisionOptions(policy=policy),
        data=DataOptions(tokenizer=str(folder)) if has_tokenizer else DataOptions(source="synthetic"),
    )


def as_file(directory: str | Path, ignore: str = "") -> str:
    """Returns a configuration file, as Python, that trains a folder's model from its weights, if they are there.

    For the arguments and errors see `of_folder`.
    """
    folder = expanded(directory).absolute()
    config = of_folder(folder, ignore)
    if any(folder.glob("*.safetensors")):
        config = dataclasses.replace(config, init_from=str(folder))
    values, defaults = (flags.flatten(dataclasses.asdict(one)) for one in (config, Config()))
    shown = [key for key, value in values.items() if value != defaults[key] or key in _SHOWN]
    lines = "\n".join(f"    config.{key} = {values[key]!r}" for key in shown)
    # A path may hold what would end the docstring.
    name = str(folder).replace("\\", "/").replace('"', "'")
    return _FILE.format(
        family=described(folder, ignore).family, num_layers=config.model.num_layers, directory=name, lines=lines
    )
