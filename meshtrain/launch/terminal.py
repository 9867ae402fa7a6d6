"""Output to a terminal that may go away (SIGHUP) while the program has something left to save."""

import os


def on_terminal() -> list[int]:
    """Returns which of the file descriptors of standard output and error are a terminal. Call it before SIGHUP."""
    return [descriptor for descriptor in (1, 2) if os.isatty(descriptor)]


def drop_output(descriptors: list[int]) -> None:
    """Redirects these file descriptors to /dev/null: writing to a lost terminal fails and would end the program."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for descriptor in descriptors:
        os.dup2(nowhere, descriptor)
    os.close(nowhere)
