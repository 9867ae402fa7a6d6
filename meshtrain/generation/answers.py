"""Generates texts from prompts in batches. A text ends at the end token, at a stop string, or at the maximum length.

While a text is generated, only the characters that later tokens cannot change are shown: complete characters, without
a possible start of a stop string.
"""

import dataclasses
from collections.abc import Callable, Iterable, Sequence

from meshtrain.data.encoding.text_bytes import HALF
from meshtrain.generation.sampling import Sampling
from meshtrain.generation.token_loop import Generator, Request
from meshtrain.models.task import Decode


@dataclasses.dataclass(frozen=True)
class Wanted:
    """Options of a generation: number, length, sampling and end of the texts.

    Attributes:
      num_tokens: maximum number of generated tokens in each text.
      sampling: temperature, top-k and top-p.
      stops: strings that end a text; the text does not include them.
      num_samples: number of texts for each prompt.
      seed: the seed of the random numbers.
    """

    num_tokens: int
    sampling: Sampling = Sampling()  # noqa: RUF009  frozen
    stops: Sequence[str] = ()
    num_samples: int = 1
    seed: int = 0


class Text:
    """A text that is being generated, with the tokens received so far.

    Attributes:
      ids: the ids of the tokens received so far, without the end token.
      text: the decoded characters that cannot change any more: complete, and without any part of a stop string.
      ended: why the text has ended: `end` (the end token), `stop` (a stop string), or `length` (the maximum length);
        '' if it has not ended.
    """

    def __init__(
        self, decode: Callable[[Iterable[int]], str], before: Sequence[int] = (), stops: Sequence[str] = ()
    ) -> None:
        """Starts an empty text.

        Args:
          decode: ids -> text.
          before: the ids of the prompt if the text continues the prompt, else (). They are decoded together with the
            text, because otherwise a tokenizer may omit the blank before the first word.
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
        """Appends tokens to the text; returns whether the text has ended.

        Args:
          ids: the ids of the next tokens, without the end token.
          is_last: whether no token follows, because of the end token or the maximum length.
          at_most: the maximum number of tokens in the text.
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
    """Returns the start of the stop string whose end comes first in a text, or None if the text has no stop string.

    Characters after this stop string do not change the result.

    >>> first_stop("one, two. three", [".", ", two. t"]), first_stop("one", ["."])
    (8, None)
    """
    result = [(begin + len(stop), begin) for stop in stops if (begin := text.find(stop)) >= 0]
    return min(result)[1] if result else None


def num_settled(text: str, stops: Sequence[str]) -> int:
    """Returns the number of leading characters of a text that cannot change when more tokens are generated.

    An incomplete character at the end can still change. A prefix of a stop string at the end may still be removed.

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
    """Generates texts; returns all samples for the first prompt, then all samples for the second prompt, and so on.

    Args:
      generator: the token generator.
      decode: ids -> text.
      prompts: the token ids of each prompt, at least one prompt.
      wanted: the number, length and sampling of the texts.
      show: a function that is called with the index of a text in the result, and the text so far, each time the text
        has received tokens.
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
    """Returns how many tokens the model can generate after a prompt: 0 if the prompt is too long, -1 if unlimited.

    Args:
      decode: the task's functions for generation, with the limits of the model.
      longest_prompt: number of tokens in the longest prompt.
    """
    if decode.max_prompt and longest_prompt > decode.max_prompt:
        return 0
    return _num_left(decode.max_positions, decode.continues, longest_prompt)


def num_trained_left(decode: Decode, longest_prompt: int) -> int:
    """Returns how many tokens can follow a prompt before both exceed the length of a training sequence; -1 if unknown.

    0 means that the prompt already has this length, or is longer.

    Args:
      decode: the task's functions for generation, with the length of its training sequences.
      longest_prompt: number of tokens in the longest prompt.
    """
    return _num_left(decode.trained_positions, decode.continues, longest_prompt)


def fitting(decode: Decode, longest_prompt: int, most: int, *, within_training: bool) -> int:
    """Returns the number of tokens to generate: `most`, reduced if the model has too few positions after the prompt.

    0 means that the prompt is too long for the model.

    Args:
      decode: the task's functions for generation, with the limits of the model.
      longest_prompt: number of tokens in the longest prompt.
      most: the requested number of tokens.
      within_training: whether prompt and text must also fit into a training sequence. This limit is ignored if the
        prompt already fills a training sequence.
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
    """Prints the texts of a batch in order while they are generated.

    Each text is printed as it grows, but not before all previous texts have ended.
    """

    def __init__(self, write: Callable[[str], object], heads: Sequence[str]) -> None:
        """Creates the writer; nothing is written yet.

        Args:
          write: a function that is called with each piece of text to print.
          heads: for each generated text, the text to write before it: a title, and the prompt that the text continues.
        """
        self._write = write
        self._heads = heads
        self._texts: dict[int, Text] = {}
        self._current = 0
        self._num_written = -1  # characters of the current text; -1: its head is not written yet

    def __call__(self, index: int, text: Text) -> None:
        """Writes the new characters of the text number `index`, or delays them until all previous texts have ended."""
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
