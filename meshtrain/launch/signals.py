"""SIGTERM and SIGINT between two steps: all processes of a run stop after the same one."""

import contextlib
import signal
from collections.abc import Callable, Iterator
from types import FrameType

import jax
from jax.experimental import multihost_utils


@contextlib.contextmanager
def interruptions() -> Iterator[Callable[[int], bool]]:
    """Gives a function, to be called once after each step with its number: whether to save and stop after it.

    So no step is cut in two. A second SIGINT ends at once.
    """
    arrived: list[int] = []
    is_alone = jax.process_count() == 1

    def note(number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and number in arrived:
            raise KeyboardInterrupt
        arrived.append(number)
        if not is_alone:
            signal.raise_signal(signal.SIGTERM)

    # With several processes SIGTERM belongs to JAX, which tells the others and finds a step that nobody has passed yet.
    numbers = (signal.SIGTERM, signal.SIGINT) if is_alone else (signal.SIGINT,)
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
