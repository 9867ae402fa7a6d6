"""Starts the bucket server of `bucket_server.py` and points the clients of Google's storage at it."""

import contextlib
import dataclasses
import itertools
import pathlib
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator

ROOT = pathlib.Path(__file__).parents[1]


@dataclasses.dataclass(frozen=True)
class Server:
    """A server that runs, and what has to stand in the environment of its clients."""

    process: subprocess.Popen[str]
    environment: dict[str, str]
    numbers: Iterator[int] = dataclasses.field(default_factory=itertools.count)

    def prefix(self) -> str:
        return f"gs://runs/run{next(self.numbers)}"

    @contextlib.contextmanager
    def gone(self, after_seconds: float) -> Iterator[None]:
        """The network to the server is gone from the begin of the block, and back after these seconds."""
        self.process.send_signal(signal.SIGUSR1)
        timer = threading.Timer(after_seconds, self.process.send_signal, [signal.SIGUSR2])
        timer.start()
        yield
        timer.join()


@contextlib.contextmanager
def started() -> Iterator[Server]:
    """Yields a server of its own process, which ends with the block."""
    command = [sys.executable, "-m", "tests.bucket_server"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        try:
            assert process.stdout is not None
            url = f"http://127.0.0.1:{int(process.stdout.readline())}"
            nowhere = "127.0.0.1:1"  # of a machine that has no credentials: answered at once
            yield Server(
                process,
                {
                    "STORAGE_EMULATOR_HOST": url,  # of gcsfs
                    "TENSORSTORE_GCS_HTTP_URL": url,
                    "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",  # it would ask for the kind of bucket each time
                    "NO_GCE_CHECK": "true",
                    "GCE_METADATA_HOST": nowhere,
                    "GCE_METADATA_IP": nowhere,
                    "GCE_METADATA_ROOT": nowhere,
                },
            )
        finally:
            process.terminate()
