"""Generates texts from prompts in batches; the end token, a stop string or the maximum length ends a text.

While a text is generated, only the part that later tokens cannot change is shown: complete characters, and no possible
start of a stop string.
"""

import dataclasses
from collections.abc import Callable, Iterable, Sequence

from meshtrain.data.encoding.text_bytes import HALF
from meshtrain.generation.sampling import Sampling
from meshtrain.generation.token_loop import Generator, Request
from meshtrain.models.task import Decode


@dataclasses.dataclass(frozen=True)
class Wanted:
    """The texts to generate for each prompt.

    Attributes:
      num_tokens: the maximum in each text.
      sampling: how tokens are chosen.
      stops: strings that end a text; the text does not include them.
      num_samples: texts per prompt.
      seed: the seed of the random numbers.
    """

    num_tokens: int
    sampling: Sampling = Sampling()  # noqa: RUF009  frozen
    stops: Sequence[str] = ()
    num_samples: int = 1
    seed: int = 0


class Text:
    """The text of one request while its tokens are generated.

    Attributes:
      ids: its tokens so far.
      text: the part that cannot change any more: complete characters, without any part of a stop string.
      ended: `end` (the end token), `stop` (a stop string), `length` (the maximum length), or empty while it is
        generated.
    """

    def __init__(
        self, decode: Callable[[Iterable[int]], str], before: Sequence[int] = (), stops: Sequence[str] = ()
    ) -> None:
        """Starts an empty text.

        Args:
          decode: ids -> text.
          before: the tokens of the prompt that the text continues. Without them, a tokenizer may omit the blank before
            the first word.
          stops: strings that end the text; the text does not include them.
        """
        self.decode = decode
        self.before = list(before)
        self.prefix = decode(self.before) if self.before else ""
        self.stops = tuple(stops)
        self.ids: list[int] = []
        self.text = ""
        self.ended = ""

    def add(self, ids: Sequence[int], is_last: bool, at_most: int) -> bool:
        """Adds tokens; returns whether the text has ended.

        Args:
          ids: the next tokens, without the end token.
          is_last: whether these are the last tokens.
          at_most: the maximum number of tokens.
        """
        self.ids += ids
        text = self._decode()
        cut = first_stop(text, self.stops)
        if cut is not None:
            self.text, self.ended = text[:cut], "stop"
            return True
        if is_last:
            self.text, self.ended = text, "length" if len(self.ids) == at_most else "end"
            return True
        self.text = text[: num_settled(text, self.stops)]
        return False

    def _decode(self) -> str:
        text = self.decode([*self.before, *self.ids])
        return text.removeprefix(self.prefix) if text.startswith(self.prefix) else self.decode(self.ids)


def first_stop(text: str, stops: Sequence[str]) -> int | None:
    """Returns the start of the stop string that is completed earliest, or None.

    The result does not depend on the length of the text after it.

    >>> first_stop("one, two. three", [".", ", two. t"]), first_stop("one", ["."])
    (8, None)
    """
    result = [(begin + len(stop), begin) for stop in stops if (begin := text.find(stop)) >= 0]
    return min(result)[1] if result else None


def num_settled(text: str, stops: Sequence[str]) -> int:
    """Returns the number of leading characters that later text cannot change.

    An incomplete character at the end can change, and so can a possible prefix of a stop string.

    >>> num_settled("one tw", ["two"]), num_settled("one", ["two"])
    (4, 3)
    """
    num_settled = len(text.rstrip(HALF))
    longest = max((len(stop) for stop in stops), default=1) - 1
    for begin in range(max(0, num_settled - longest), num_settled):
        if any(stop.startswith(text[begin:num_settled]) for stop in stops):
            return begin
    return num_settled


def answers(
    generator: Generator,
    decode: Callable[..., str],
    prompts: Sequence[Sequence[int]],
    wanted: Wanted,
    show: Callable[[int, Text], None] = lambda index, text: None,
) -> list[Text]:
    """Returns the texts that follow the prompts: all samples of the first prompt, then all samples of the second, ...

    Args:
      generator: generates tokens.
      decode: ids -> text.
      prompts: the token ids of each prompt, at least one prompt.
      wanted: the number, length and sampling of the texts.
      show: called with the index of a text, and the text so far, when it has become longer or has ended.
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
    """Returns how many tokens can follow a prompt of this length; below 1 if it is too long, -1 without a limit."""
    if decode.max_prompt and longest_prompt > decode.max_prompt:
        return 0
    return _num_left(decode.max_positions, decode.continues, longest_prompt)


def num_trained_left(decode: Decode, longest_prompt: int) -> int:
    """Returns how many tokens fit after a prompt in a training sequence; below 1 for none, -1 if unknown."""
    return _num_left(decode.trained_positions, decode.continues, longest_prompt)


def fitting(decode: Decode, longest_prompt: int, most: int, *, within_training: bool) -> int:
    """Returns how many of `most` tokens fit after a prompt: in the model's positions, and in a training sequence.

    0 means that the prompt is too long for the model. If the prompt alone is longer than a training sequence, only the
    model's positions limit the text.
    """
    room, trained = room_left(decode, longest_prompt), num_trained_left(decode, longest_prompt)
    if room == 0:
        return 0
    return min([most, *([room] if room > 0 else []), *([trained] if within_training and trained > 0 else [])])


def _num_left(positions: int, continues: bool, longest_prompt: int) -> int:
    if not positions:
        return -1
    return max(positions - longest_prompt, 0) if continues else positions


class Shown:
    """Writes texts while they are generated, in order: a text is written after all previous texts have ended."""

    def __init__(self, write: Callable[[str], object], heads: Sequence[str]) -> None:
        """Starts with nothing written.

        Args:
          write: receives pieces of text.
          heads: the text to write before each generated text: a title, and the prompt that it continues.
        """
        self._write = write
        self._heads = heads
        self._texts: dict[int, Text] = {}
        self._current = 0
        self._num_written = -1  # characters of the current text; -1: its head is not written yet

    def __call__(self, index: int, text: Text) -> None:
        """Writes the new part of `text`, the text at this index, which has become longer or has ended."""
        self._texts[index] = text
        while self._current in self._texts:
            text = self._texts[self._current]
            if self._num_written < 0:
                self._write(self._heads[self._current])
                self._num_written = 0
            if new := text.text[self._num_written :]:
                self._write(new)
            self._num_written = len(text.text)
            if not text.ended:
                return
            self._write("\n")
            self._current, self._num_written = self._current + 1, -1
