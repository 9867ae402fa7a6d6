"""Signals that the tests ignore, as nohup and a shell's background want it, and that what they start has to heed."""

import signal


def handled_instead_of_ignored() -> None:
    """Gives ignored signals a handler that does nothing: unlike SIG_IGN, what is started does not inherit it."""
    for number in (signal.SIGINT, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, lambda *_: None)
