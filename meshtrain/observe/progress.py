"""Prints to the terminal: start-up phases, log lines, and a progress bar below them."""

import contextlib
import sys
import time
from collections.abc import Callable, Iterator

import tqdm


class Progress:
    """Prints log lines and, on a terminal, a bar that stays below them; processes other than 0 print nothing.

    In use:
        with closing(Progress(num_steps, start_step, is_main=peers.is_main_process())) as progress:
            progress.line("step 10  loss 3.2")
            progress.advance_to(10)
    """

    def __init__(self, num_steps: int, start_step: int = 0, *, is_main: bool = True, show_bar: bool = True) -> None:
        """Creates the bar.

        Args:
          num_steps: the number of steps of the complete run.
          start_step: the number of steps done before this start (in a resumed run).
          is_main: whether this is process 0.
          show_bar: whether to draw a bar if standard error is a terminal; log lines are printed in any case.
        """
        self._is_main = is_main
        # For tqdm, None means: only on a terminal.
        disable = None if is_main and show_bar else True
        self._bar = tqdm.tqdm(
            total=num_steps, initial=start_step, disable=disable, unit="step", dynamic_ncols=True, file=sys.stderr
        )

    def line(self, text: str) -> None:
        """Prints a line on standard output, above the bar."""
        if self._is_main:
            self._bar.write(text, file=sys.stdout)
            # Without a flush, a pipe or a file would receive the lines in blocks, minutes later.
            sys.stdout.flush()

    def advance_to(self, step: int) -> None:
        """Moves the bar to this number of completed steps."""
        self._bar.update(step - self._bar.n)

    def close(self) -> None:
        """Ends the bar's line. The method may be called several times."""
        self._bar.close()


@contextlib.contextmanager
def phase(
    name: str, *, is_main: bool = True, now: Callable[[], float] = time.perf_counter
) -> Iterator[Callable[[str], None]]:
    """Times a phase of start-up and prints its line on standard output at the end, unless the block raises.

        with phase("mesh") as say:
            ...
            say("8 cpu devices")

    prints `mesh            0.12 s  8 cpu devices`.

    Args:
      name: the name of the phase, at the start of the line.
      is_main: whether this is process 0; other processes print nothing.
      now: a function that returns a monotonic time in seconds.

    Yields:
      A function that sets the text at the end of the line; a second call replaces the text.
    """
    texts = [""]
    start_seconds = now()
    yield lambda text: texts.append(text)
    if is_main:
        print(f"{name:<12} {now() - start_seconds:7.2f} s  {texts[-1]}".rstrip(), flush=True)
