"""Texts on the terminal while they are drawn: one after the other, in the order of the request."""

from collections.abc import Callable, Sequence

from meshtrain.generation.text import Text


class Shown:
    """Writes texts as they come; a text is written while it is drawn if those before it have ended."""

    def __init__(self, write: Callable[[str], object], heads: Sequence[str]) -> None:
        """Begins with nothing written.

        Args:
          write: takes pieces of text.
          heads: what stands before each text: a title, the prompt that it continues.
        """
        self._write = write
        self._heads = heads
        self._texts: dict[int, Text] = {}
        self._current = 0
        self._num_written = -1  # characters of the current text; -1: its head is not written yet

    def __call__(self, index: int, text: Text) -> None:
        """Writes what is new: `text`, at this index, has become longer or has ended."""
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
