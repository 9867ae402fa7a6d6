"""Creates a configuration for the model in a Hugging Face folder, and the equivalent configuration file."""

import dataclasses
import math
from pathlib import Path

from meshtrain.cli import flags
from meshtrain.config.build import defaults_of
from meshtrain.config.schema import Config
from meshtrain.data.encoding.tokenizer_folder import TOKENIZER
from meshtrain.data.sources import DataOptions
from meshtrain.files import expand_user, what_is_at
from meshtrain.hf.config_json import describe_model
from meshtrain.optim.learning_rate import LearningRateOptions
from meshtrain.sharding.rules import AXES
from meshtrain.step.precision import PrecisionOptions

LONGEST, BATCH_SIZE = 1024, 8  # of the created configuration: maximum sequence length in tokens, batch in sequences
LARGEST_BATCH, EPOCHS, LEAST_STEPS, WANTED_STEPS = 64, 3, 100, 250
_SHOWN = ("num_steps", *(f"mesh.{axis}" for axis in AXES))  # keys that the file sets even if they have their defaults
_FILE = '''\
"""A {family} of {num_layers} layers, from {directory}.

{about}
"""

from meshtrain.config import default


def get_config():
    config = default({task})
{lines}
    return config
'''


def of_folder(directory: str | Path, ignore: str = "") -> Config:
    """Returns an unresolved configuration with the model of a Hugging Face folder.

    The function reads config.json. If config.json ties the embeddings although the files have a separate output head,
    it also reads these tensors; if config.json states a quantization, it also reads the dtypes of tensors. Text is
    encoded with the folder's tokenizer and chat template. Without a tokenizer.json, the data source is `synthetic`, for
    which a text is a list of token ids, written as numbers.

    Args:
      directory: the path of the folder.
      ignore: unknown keys of config.json to ignore, comma separated; becomes the option `init_ignore`.

    Raises:
      UserError: one line for each key of config.json that is missing, invalid or not supported.
    """
    folder = expand_user(directory).absolute()
    folder_content = describe_model(folder, ignore)
    has_tokenizer = what_is_at(folder / TOKENIZER) == "a file"
    # Weights of any other dtype are trained with the default policy, in float32.
    policy = "bfloat16" if folder_content.dtype == "bfloat16" else PrecisionOptions.policy
    return Config(
        model=folder_content.options,
        sequence_length=min(folder_content.max_length or LONGEST, LONGEST),
        batch_size=BATCH_SIZE,
        init_ignore=ignore,
        precision=PrecisionOptions(policy=policy),
        data=DataOptions(tokenizer=str(folder)) if has_tokenizer else DataOptions(source="synthetic"),
    )


def fine_tuned(config: Config, rank: int, num_sequences: int) -> Config:
    """Returns a folder's configuration with learning rates for fine-tuning, and batch size and steps for the data.

    The peak rate is 0.1 over the model's width, 2.4e-5 for 4,096, near the 2e-5 of Alpaca (Taori et al. 2023), and ten
    times this rate for adapters (Schulman et al. 2025, LoRA Without Regret). The batch size is the power of two, 8 to
    64, with which three epochs take about 250 steps. With few sequences, more epochs are trained, so that the run has
    at least 100 steps.

    Args:
      config: a configuration from `of_folder`.
      rank: the rank of the LoRA adapters; 0: all weights are trained, without adapters.
      num_sequences: the number of training sequences; 0: unknown, so batch size and steps are not changed.
    """
    batch_size, num_steps, eval_every = config.batch_size, config.num_steps, config.eval_every
    if num_sequences:
        seen = EPOCHS * num_sequences
        batch_size = min(max(2 ** round(math.log2(seen / WANTED_STEPS)), BATCH_SIZE), LARGEST_BATCH)
        num_steps = max(math.ceil(seen / batch_size), LEAST_STEPS)
        eval_every = math.ceil(num_steps / 5)
    peak = float(f"{(1.0 if rank else 0.1) / config.model.embed_dim:.2g}")
    rate = LearningRateOptions(peak=peak, warmup_steps=num_steps // 10)
    return dataclasses.replace(
        config, batch_size=batch_size, num_steps=num_steps, eval_every=eval_every, learning_rate=rate
    )


def as_file(directory: str | Path, config: Config, num_sequences: int = 0) -> str:
    """Returns the Python source of a configuration file, whose `get_config()` returns `config`.

    Args:
      directory: the absolute path of the Hugging Face folder.
      config: the configuration, from `of_folder` or `fine_tuned`.
      num_sequences: the number of training sequences, which the docstring of the file states. 0: the number is unknown,
        and the docstring says that the data are only an example.
    """
    values, defaults = (flags.flatten(one) for one in (config, defaults_of(config)))
    shown = [key for key, value in values.items() if value != defaults[key] or key in _SHOWN]
    about = "The mesh and the data are examples. For your own files: data.source = 'text' and data.path."
    if num_sequences:
        about = f"Batch, steps and rates are for {num_sequences:,} sequences. The mesh is an example."
    folder_content = describe_model(directory, config.init_ignore)
    # A path may contain characters that would end the docstring.
    name = str(directory).replace("\\", "/").replace('"', "'")
    return _FILE.format(
        family=folder_content.family,
        num_layers=config.model.num_layers,
        directory=name,
        about=about,
        task="" if config.task == Config.task else repr(config.task),
        lines="\n".join(f"    config.{key} = {values[key]!r}" for key in shown if key != "task"),
    )
