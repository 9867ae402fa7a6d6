"""From tokens to the text that is shown: whole characters, up to a stop string."""

from collections.abc import Callable, Iterable, Sequence

HALF = "\N{REPLACEMENT CHARACTER}"  # how a tokenizer decodes the bytes of half a character


class Text:
    """The text of one request, as its tokens come.

    Attributes:
      ids: its tokens so far.
      text: what will not change any more: whole characters, nothing of a stop string.
      ended: `end` (the end token), `stop` (a stop string), `length` (the most tokens), or empty while it goes on.
    """

    def __init__(
        self, decode: Callable[[Iterable[int]], str], before: Sequence[int] = (), stops: Sequence[str] = ()
    ) -> None:
        """Begins an empty text.

        Args:
          decode: ids -> text.
          before: the tokens of a prompt that the text continues: a tokenizer may decode a word's first token without
            the blank before it unless there are tokens before.
          stops: strings that end the text; they are no part of it.
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
          ids: the next ones, without the end token.
          is_last: whether no more will come.
          at_most: number of tokens at which a text ends by its length.
        """
        self.ids += ids
        text = self._decoded()
        cut = first_stop(text, self.stops)
        if cut is not None:
            self.text, self.ended = text[:cut], "stop"
            return True
        if is_last:
            self.text, self.ended = text, "length" if len(self.ids) == at_most else "end"
            return True
        self.text = text[: settled(text, self.stops)]
        return False

    def _decoded(self) -> str:
        text = self.decode([*self.before, *self.ids])
        return text.removeprefix(self.prefix) if text.startswith(self.prefix) else self.decode(self.ids)


def first_stop(text: str, stops: Sequence[str]) -> int | None:
    """Returns where the stop string that is complete first begins; None without one.

    Which one that is does not depend on how much text follows.

    >>> first_stop("one, two. three", [".", ", two. t"]), first_stop("one", ["."])
    (8, None)
    """
    result = [(begin + len(stop), begin) for stop in stops if (begin := text.find(stop)) >= 0]
    return min(result)[1] if result else None


def settled(text: str, stops: Sequence[str]) -> int:
    """Returns how many characters of a text do not depend on what follows it.

    Half a character at the end does, and what may be the beginning of a stop string.

    >>> settled("one tw", ["two"]), settled("one", ["two"])
    (4, 3)
    """
    num_settled = len(text.rstrip(HALF))
    longest = max((len(stop) for stop in stops), default=1) - 1
    for begin in range(max(0, num_settled - longest), num_settled):
        if any(stop.startswith(text[begin:num_settled]) for stop in stops):
            return begin
    return num_settled
