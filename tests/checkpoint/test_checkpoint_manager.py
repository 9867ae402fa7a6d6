"""What a failed save leaves behind says nothing on the terminal, and nothing else is suppressed."""

import logging
import sys
import warnings

from meshtrain.checkpoint import manager


async def async_serialize_from_host():
    """Has the name of Orbax's function."""


async def of_somebody_else():
    """Has another name."""


def test_a_write_that_had_not_begun_is_not_warned_of(monkeypatch):
    for name in ("absl", "asyncio"):
        monkeypatch.setattr(logging.getLogger(name), "filters", [])
    monkeypatch.setattr(sys, "unraisablehook", sys.unraisablehook)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        manager.silence.__wrapped__()
        async_serialize_from_host()
        of_somebody_else()
    assert [str(one.message) for one in caught] == ["coroutine 'of_somebody_else' was never awaited"]
