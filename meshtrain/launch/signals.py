"""SIGTERM, SIGINT and SIGHUP between two steps: all processes of a run stop after the same one."""

import contextlib
import signal
from collections.abc import Callable, Iterator
from types import FrameType

import jax
from jax.experimental import multihost_utils

from meshtrain.launch import starting
from meshtrain.launch.terminal import drop_output, on_terminal


@contextlib.contextmanager
def interruptions() -> Iterator[Callable[[int], bool]]:
    """Yields a function that returns whether to save and stop. Call it once after each step, with the step's number.

    Signals thus take effect between steps only. A second SIGINT ends the program at once. After SIGHUP the terminal is
    gone: output to it is dropped, because a failed write would end the run before its save.
    """
    arrived: list[int] = []
    is_alone = jax.process_count() == 1
    starting.over(() if is_alone else (signal.SIGTERM,))
    descriptors = on_terminal()

    def note(number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and number in arrived:
            raise KeyboardInterrupt
        if number == signal.SIGHUP:
            drop_output(descriptors)
        arrived.append(number)
        if not is_alone:
            signal.raise_signal(signal.SIGTERM)

    # With several processes JAX handles SIGTERM: it tells the others, and they agree on a step that none has passed.
    numbers = [number for number in starting.heeded() if is_alone or number != signal.SIGTERM]
    try:
        before = {number: signal.signal(number, note) for number in numbers}
    except ValueError:  # not the main thread, as in some notebooks: Python allows no handlers here
        yield lambda step: False
        return
    try:
        yield (lambda step: bool(arrived)) if is_alone else multihost_utils.reached_preemption_sync_point
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
