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
    """Gives a function, to be called once after each step with its number: whether to save and stop after it.

    So no step is cut in two. A second SIGINT ends at once. SIGHUP means that the terminal is gone: what would be
    printed on it is dropped from then on, since a failed write would end the run before its save.
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

    # With several processes SIGTERM belongs to JAX, which tells the others and finds a step that nobody has passed yet.
    numbers = [number for number in starting.heeded() if is_alone or number != signal.SIGTERM]
    try:
        before = {number: signal.signal(number, note) for number in numbers}
    except ValueError:  # not the main thread, as in some notebooks: signals are somebody else's there
        yield lambda step: False
        return
    try:
        yield (lambda step: bool(arrived)) if is_alone else multihost_utils.reached_preemption_sync_point
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
