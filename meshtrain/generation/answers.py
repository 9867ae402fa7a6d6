"""Prompts -> texts: each prompt's samples, drawn in batches, ended by the end token, a stop string or their length."""

import dataclasses
from collections.abc import Callable, Sequence

from meshtrain.generation.detokenize import Text
from meshtrain.generation.sampling import Sampling
from meshtrain.generation.token_loop import Generator, Request
from meshtrain.models.decode import Decode


@dataclasses.dataclass(frozen=True)
class Wanted:
    """What is drawn for each prompt.

    Attributes:
      num_tokens: at most, in each text.
      sampling: how tokens are chosen.
      stops: strings that end a text; they are no part of it.
      num_samples: texts for each prompt.
      seed: of the random numbers.
    """

    num_tokens: int
    sampling: Sampling = Sampling()  # noqa: RUF009  frozen
    stops: Sequence[str] = ()
    num_samples: int = 1
    seed: int = 0


def answers(
    generator: Generator,
    decode: Callable[..., str],
    prompts: Sequence[Sequence[int]],
    wanted: Wanted,
    show: Callable[[int, Text], None] = lambda index, text: None,
) -> list[Text]:
    """Returns the texts that follow the prompts: all samples of the first prompt, then those of the second, ...

    Args:
      generator: generates tokens.
      decode: ids -> text.
      prompts: ids of each, at least one.
      wanted: how many, how long, how chosen.
      show: called with the index of a text, and the text so far, whenever it has become longer or has ended.
    """
    requests = [
        Request(ids, prompt, sample) for prompt, ids in enumerate(prompts) for sample in range(wanted.num_samples)
    ]
    continues = generator.decode.continues
    texts = [Text(decode, request.ids if continues else (), wanted.stops) for request in requests]

    def take(index: int, ids: list[int], is_last: bool) -> bool:
        text = texts[index]
        has_ended = text.add(ids, is_last, wanted.num_tokens)
        show(index, text)
        return has_ended

    generator.draw(requests, wanted.num_tokens, wanted.sampling, wanted.seed, take)
    return texts


def room_left(decode: Decode, longest_prompt: int) -> int:
    """Returns how many tokens can follow a prompt of this length; below 1 if it is too long, -1 for any number."""
    if decode.max_prompt and longest_prompt > decode.max_prompt:
        return 0
    return _left(decode.max_positions, decode.continues, longest_prompt)


def trained_left(decode: Decode, longest_prompt: int) -> int:
    """Returns how many tokens can follow a prompt within the positions of training; below 1 for none, -1: unknown."""
    return _left(decode.trained_positions, decode.continues, longest_prompt)


def fitting(decode: Decode, longest_prompt: int, most: int, *, within_training: bool) -> int:
    """Returns how many of `most` tokens fit after a prompt: in the model's positions, and in those of training.

    0 means that the prompt is too long for the model. Beyond the positions of training, which a long prompt can leave
    no room in, text is possible.
    """
    room, trained = room_left(decode, longest_prompt), trained_left(decode, longest_prompt)
    if room == 0:
        return 0
    return min([most, *([room] if room > 0 else []), *([trained] if within_training and trained > 0 else [])])


def _left(positions: int, continues: bool, longest_prompt: int) -> int:
    if not positions:
        return -1
    return max(positions - longest_prompt, 0) if continues else positions
