"""The task `seq2seq`: its options, and what of them contradicts each other, the data or the mesh."""

from collections.abc import Mapping

from meshtrain.config import checks
from meshtrain.config.fields import Config
from meshtrain.config.tasks import BuiltIn, of_text
from meshtrain.examples import seq2seq_task
from meshtrain.examples.numbers import BEGIN_ID
from meshtrain.examples.seq2seq import Seq2SeqOptions
from meshtrain.layout.placement import Placement
from meshtrain.layout.rules import default_rules
from meshtrain.models import remat
from meshtrain.models.lora import with_adapters
from meshtrain.models.task import Task

PAIRS = ("numbers",)  # sources of pairs of a source and a target


def make(config: Config, placement: Placement) -> Task:
    """Returns the encoder-decoder that a configuration describes."""
    return with_adapters(seq2seq_task.seq2seq(config.model, **of_text(config, placement)), config.lora)


def check(config: Config, mesh_shape: Mapping[str, int]) -> list[str]:
    """Returns one line for each way in which an encoder-decoder's options contradict each other, the data or the mesh.

    Args:
      config: with `Seq2SeqOptions` as its model, each field within its own bounds.
      mesh_shape: the size of each mesh axis.
    """
    options, found = config.model, checks.sources(config, PAIRS, "pairs of a source and a target")
    if options.source_length:
        rules = default_rules(config.layout)
        found += checks.sequence(options.source_length, rules, mesh_shape, name="model.source_length")
    found += [
        *checks.transformer(options, config.precision),
        *remat.check(config.remat, options.num_layers, mesh_shape["pipeline"]),
        *remat.check(config.remat, options.num_encoder_layers, 1, name="model.num_encoder_layers"),
    ]
    if options.positions == "sinusoidal" and options.embed_dim % 2:
        found.append(
            f"model.embed_dim: got {options.embed_dim}; allowed: an even number with sinusoidal positions; nearest: "
            f"{options.embed_dim + 1}"
        )
    if config.data.source in PAIRS and options.begin_id != BEGIN_ID:
        found.append(
            f"model.begin_id: got {options.begin_id}; allowed with data.source={config.data.source}: {BEGIN_ID}, with "
            f"which its targets begin; nearest: {BEGIN_ID}"
        )
    elif options.begin_id >= options.vocab_size:
        found.append(
            f"model.begin_id: got {options.begin_id}; allowed: a token, below model.vocab_size = {options.vocab_size}; "
            f"nearest: {options.vocab_size - 1}"
        )
    return found


seq2seq = BuiltIn("seq2seq", make, Seq2SeqOptions, check, takes_adapters=True)
