"""Messages between the processes of a job before JAX connects them: over TCP, through process 0, each with a limit.

JAX ends a process without a word about the others when one of them is missing. Here process 0 listens at the port that
JAX will listen at. The others connect, and stay connected when it has stopped listening, so that process 0 can say who
is missing or stuck whatever JAX does. A message is one line of JSON.
"""

import json
import os
import selectors
import socket
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol, Self

from meshtrain.launch.cluster import Meeting

_MOST_BYTES = 2**22  # of a message: more is from something else
_RETRY_SECONDS = 0.2
_CONNECT_SECONDS = 5.0
_CLOCK_SECONDS = 2.0
_NUM_CLOCK_TIMES = 8
_GRACE_SECONDS = 10.0  # process 0 waits for the others first, and answers then
_CLOCK, _ALL = "clock", "all"


class Unreachable(Exception):
    """Process 0 cannot be reached, or does not answer; the text is what was seen."""


class RollCall(Protocol):
    """A way to exchange values between the processes that have registered."""

    def exchange(self, name: str, value: Any, seconds: float) -> dict[int, Any]:
        """Returns process -> value, of those that answer within a time. All of them call it, with the same names."""


class Single:
    """The roll call of a single process."""

    def exchange(self, name: str, value: Any, seconds: float) -> dict[int, Any]:
        """Returns the process' own value."""
        return {0: value}


class Hub:
    """Process 0's side: it listens until all have registered, and passes on what they say."""

    def __init__(self, meeting: Meeting, environ: Mapping[str, str]) -> None:
        """Listens at the port of the meeting.

        Args:
          meeting: where the processes meet.
          environ: of this process; JAX_COORDINATOR_BIND_ADDRESS names another address to listen at, as for JAX.

        Raises:
          OSError: another program has the port, or the address is not of this machine.
        """
        self._num_others = meeting.num_processes - 1
        self._is_listening = True
        self._own: dict[int, _Connection] = {}
        self.refused: list[str] = []
        bound = environ.get("JAX_COORDINATOR_BIND_ADDRESS")
        host, _, port = (bound or f"[::]:{meeting.port}").rpartition(":")
        host = host.strip("[]")
        if host in ("", "::") and socket.has_dualstack_ipv6():
            self._server = socket.create_server(("", int(port)), family=socket.AF_INET6, dualstack_ipv6=True)
        else:
            family = socket.AF_INET6 if ":" in host and host != "::" else socket.AF_INET
            self._server = socket.create_server(("" if host == "::" else host, int(port)), family=family)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._server, selectors.EVENT_READ)

    def exchange(self, name: str, value: Any, seconds: float) -> dict[int, Any]:
        """Returns process -> value, of those that answered in time, and tells them the same."""
        self._pump(time.monotonic() + seconds, lambda: self._has_all(name))
        found = {0: value, **{i: one.said[name] for i, one in sorted(self._own.items()) if name in one.said}}
        for one in self._own.values():
            one.send({"name": name, _ALL: {str(process): each for process, each in found.items()}})
        return found

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Closes the connections."""
        if self._is_listening:
            self.stop_listening()
        for one in list(self._selector.get_map().values()):
            one.data.close()
        self._selector.close()

    def stop_listening(self) -> None:
        """Leaves the port, so that JAX can listen there; the connections stay."""
        self._is_listening = False
        self._selector.unregister(self._server)
        self._server.close()

    def offsets(self, now: Callable[[], float] = time.time) -> dict[int, tuple[float, float]]:
        """Returns process -> (seconds that its clock is ahead, half a round trip); see `clock_offset`."""
        found = {}
        for process, one in self._own.items():

            def ask(one: "_Connection" = one) -> float | None:
                one.said.pop(_CLOCK, None)
                one.send({"name": _CLOCK})
                self._pump(time.monotonic() + _CLOCK_SECONDS, lambda: _CLOCK in one.said or not one.is_open)
                return one.said.get(_CLOCK)

            if (offset := clock_offset(ask, now)) is not None:
                found[process] = offset
        return found

    def wait_for_the_end(self, seconds: float) -> None:
        """Waits until the others have ended: JAX would abort them if this process ended first."""
        self._pump(time.monotonic() + seconds, lambda: not any(one.is_open for one in self._own.values()))

    def ended(self) -> list[int]:
        """Returns the processes whose connection is closed."""
        return sorted(process for process, one in self._own.items() if not one.is_open)

    def _has_all(self, name: str) -> bool:
        """Returns whether nobody is left who could still say this."""
        is_complete = len(self._own) == self._num_others or not self._is_listening
        return is_complete and all(name in one.said or not one.is_open for one in self._own.values())

    def _pump(self, deadline: float, is_done: Callable[[], bool]) -> None:
        """Reads what arrives until something is done, or the time is over."""
        while not is_done() and (left := deadline - time.monotonic()) > 0:
            for key, _ in self._selector.select(min(left, 1.0)):
                if key.fileobj is self._server:
                    self._accept()
                else:
                    self._read(key.data)

    def _accept(self) -> None:
        connected, address = self._server.accept()
        connected.settimeout(_CONNECT_SECONDS)
        one = _Connection(connected, str(address[0]))
        self._selector.register(connected, selectors.EVENT_READ, one)

    def _read(self, one: "_Connection") -> None:
        for message in one.read():
            if one.process is None and not self._registers(one, message):
                continue
            one.said[str(message["name"])] = message["value"]
        if not one.is_open:
            self._selector.unregister(one.socket)
            one.close()

    def _registers(self, one: "_Connection", message: Mapping[str, Any]) -> bool:
        process, count = message["process"], message["num_processes"]
        if count != self._num_others + 1:
            why = f"{one.address} was started as one of {count} processes, process 0 as one of {self._num_others + 1}"
        elif process in self._own or not 0 < process <= self._num_others:
            why = f"{one.address} says that it is process {process}, and so does another process"
        else:
            one.process, self._own[process] = process, one
            return True
        self.refused.append(why)
        one.send({"name": message["name"], "refused": why})
        return False


class Member:
    """The side of every process but 0."""

    def __init__(self, meeting: Meeting, seconds: float) -> None:
        """Connects to process 0, which may not listen yet.

        Args:
          meeting: where the processes meet.
          seconds: how long it tries.

        Raises:
          Unreachable: it cannot connect; the text is the reason of the last attempt.
        """
        self._meeting = meeting
        self._buffer = b""
        deadline = time.monotonic() + seconds
        while True:
            patience = max(0.1, min(_CONNECT_SECONDS, deadline - time.monotonic()))
            try:
                self._socket = socket.create_connection((meeting.host, meeting.port), timeout=patience)
                return
            except TimeoutError:
                reason = f"{meeting.address} does not answer"
            except ConnectionRefusedError:
                reason = f"{meeting.address} refuses the connection: nothing listens there"
            except OSError as failure:
                reason = f"{meeting.address}: {failure.strerror or failure}"
            if time.monotonic() + _RETRY_SECONDS >= deadline:
                raise Unreachable(reason)
            time.sleep(_RETRY_SECONDS)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Closes the connection."""
        self._socket.close()

    def exchange(self, name: str, value: Any, seconds: float) -> dict[int, Any]:
        """Returns what `Hub.exchange` returns in process 0.

        Raises:
          Unreachable: process 0 has ended, does not answer in time, or refuses this process.
        """
        self._send(name, value)
        deadline = time.monotonic() + seconds + _GRACE_SECONDS
        while True:
            message = self._receive(deadline, seconds)
            if "refused" in message:
                raise Unreachable(str(message["refused"]))
            if message["name"] == _CLOCK:
                self._send(_CLOCK, time.time())
            elif message["name"] == name:
                return {int(process): each for process, each in message[_ALL].items()}

    def _send(self, name: str, value: Any) -> None:
        message = {
            "process": self._meeting.index,
            "num_processes": self._meeting.num_processes,
            "name": name,
            "value": value,
        }
        try:
            self._socket.settimeout(_CONNECT_SECONDS)
            self._socket.sendall(json.dumps(message).encode() + b"\n")
        except OSError as failure:
            raise Unreachable(f"process 0 has ended ({failure.strerror or failure})") from failure

    def _receive(self, deadline: float, seconds: float) -> Mapping[str, Any]:
        while b"\n" not in self._buffer:
            try:
                self._socket.settimeout(max(0.01, deadline - time.monotonic()))
                piece = self._socket.recv(2**16)
            except TimeoutError:
                raise Unreachable(f"process 0 has not answered for {seconds + _GRACE_SECONDS:.0f} s") from None
            except OSError as failure:
                raise Unreachable(f"process 0 has ended ({failure.strerror or failure})") from failure
            if not piece:
                raise Unreachable("process 0 has ended")
            self._buffer += piece
        line, _, self._buffer = self._buffer.partition(b"\n")
        try:
            found = json.loads(line)
        except ValueError:
            found = None
        if not isinstance(found, dict) or "name" not in found:
            raise Unreachable(f"{self._meeting.address} is another program's: {line[:40]!r}")
        return found


class _Connection:
    """A connection that process 0 has accepted, and the newest message of each name."""

    def __init__(self, connected: socket.socket, address: str) -> None:
        self.socket = connected
        self.address = address.removeprefix("::ffff:")
        self.process: int | None = None
        self.said: dict[str, Any] = {}
        self.is_open = True
        self._buffer = b""

    def close(self) -> None:
        self.is_open = False
        self.socket.close()

    def send(self, message: Mapping[str, Any]) -> None:
        if self.is_open:
            try:
                self.socket.sendall(json.dumps(message).encode() + b"\n")
            except OSError:
                self.is_open = False

    def read(self) -> list[Mapping[str, Any]]:
        """Returns the messages that are complete; something else than a message closes the connection."""
        try:
            piece = self.socket.recv(2**16)
        except OSError:
            piece = b""
        self._buffer += piece
        *complete, self._buffer = self._buffer.split(b"\n")
        self.is_open = bool(piece) and len(self._buffer) <= _MOST_BYTES
        found: list[Mapping[str, Any]] = []
        for line in complete:
            try:
                message = json.loads(line)
            except ValueError:
                message = None
            if isinstance(message, dict) and _has_all(message):
                found.append(message)
            else:
                self.is_open = False
        return found


def clock_offset(
    ask: Callable[[], float | None], now: Callable[[], float] = time.time, num_times: int = _NUM_CLOCK_TIMES
) -> tuple[float, float] | None:
    """Returns (seconds that another clock is ahead of ours, half the round trip); None if it does not answer.

    The other clock was read at some moment between question and answer, half a round trip from their middle at most.
    The fastest of a few questions says most (Cristian 1989).

    Args:
      ask: returns what the other clock says, in seconds.
      now: what ours says.
      num_times: how often to ask.
    """
    found = []
    for _ in range(num_times):
        sent = now()
        theirs = ask()
        received = now()
        if theirs is None:
            break
        found.append((received - sent, theirs - (sent + received) / 2))
    if not found:
        return None
    trip, offset = min(found)
    return offset, trip / 2


def token() -> str:
    """Returns a name that no other job has, for files that the processes write into one folder."""
    return f"{os.getpid()}-{time.time_ns()}"


def _has_all(message: Mapping[str, Any]) -> bool:
    kinds = {"process": int, "num_processes": int, "name": str}
    return "value" in message and all(isinstance(message.get(key), kind) for key, kind in kinds.items())
