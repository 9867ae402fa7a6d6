"""Fills in `model.vocab_size=0`, which means as many tokens as the data's tokenizer has."""

import dataclasses

from meshtrain.config.fields import Config
from meshtrain.data import sources
from meshtrain.data.corpus import vocabulary_of
from meshtrain.data.tokenize import NUM_BYTES
from meshtrain.words.errors import UserError


def filled(config: Config, *, reads_data: bool) -> tuple[Config, list[str]]:
    """Returns the configuration with `vocab_size` filled in, and a line for each reason why it is unknown.

    If it is unknown, the size for bytes is filled in, so that other checks can run.

    Args:
      config: each field within its own bounds; the options of its task may have a field `vocab_size`.
      reads_data: whether the data files must exist on this machine. If so, lines of `sources.check` are not repeated.
    """
    names = [field.name for field in dataclasses.fields(config.model)]
    if "vocab_size" not in names or config.model.vocab_size != 0:
        return config, []
    size, found = NUM_BYTES + 1, list[str]()
    try:
        size = vocabulary_of(config.data)
    except UserError as error:
        if not reads_data:
            why = error.problems[0].partition("; allowed")[0]
            found.append(
                f"model.vocab_size: got 0, as many tokens as the data have, which are not known here ({why}); "
                "allowed: a number, or data that are here; nearest: 50257"
            )
        elif not sources.check(config.data):
            found += error.problems
    model = dataclasses.replace(config.model, vocab_size=size)
    return dataclasses.replace(config, model=model), found
