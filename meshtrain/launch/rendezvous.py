"""Exchanges messages between the processes of a job before JAX connects them, over TCP, with time limits.

If a process is missing, JAX ends all processes without a message that names the missing process. So process 0 first
listens on the port that JAX will use. The other processes connect, and stay connected after process 0 has stopped
listening, so that process 0 can name missing or hanging processes in any state of JAX. A message is one line of JSON.
The function `roll_call` registers a process with all other processes. The command `doctor`, `meet` (at the start of a
run) and `tell` (for a process that cannot start) call it.
"""

import contextlib
import json
import selectors
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Self, TypeVar

from meshtrain.errors import LostPeer, Problem, UserError
from meshtrain.files import Json, read_json
from meshtrain.launch.cluster import Meeting

LINE_SECONDS = 15.0  # time between two printed lines about missing processes
TRY_SECONDS = 10.0  # how long to retry if the port was just in use, or if a name server does not answer
MEET_SECONDS = 300.0  # time limit for all processes to register; the same as JAX's limit
_ADDRESSES = ("JAX_COORDINATOR_ADDRESS", "SLURM_STEP_NODELIST", "OMPI_MCA_orte_hnp_uri", "KUBERNETES_SERVICE_HOST")
_NUMBERS = ("JAX_PROCESS_ID", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "JOB_COMPLETION_INDEX")
_NAMED = 8  # maximum number of processes that a line names
_MOST_BYTES = 2**22  # maximum size of a message; a larger message comes from another program
_RETRY_SECONDS = 0.2
_CONNECT_SECONDS = 5.0
_GRACE_SECONDS = 10.0  # additional wait for the answer of process 0, which first waits for all other processes
_MEET, _AWAITED, _REFUSED = "meet", "awaited", "refused"
_T = TypeVar("_T")
_Message = Mapping[str, Json]
Said = dict[int, Json]  # process number -> the value that this process has sent


class Unreachable(Exception):
    """Process 0 cannot be reached, or does not answer; the text describes the failure."""


class Refused(Unreachable):
    """Process 0 has rejected a process: two have the same number, or they differ in the number of processes."""


class Occupied(Unreachable):
    """Process 0 cannot listen on its port; the text is the reason."""


def meet(meeting: Meeting, environ: Mapping[str, str]) -> Said:
    """Waits at most five minutes until all processes of a job have registered; prints missing processes every 15 s.

    Args:
      meeting: the address of process 0, the number of processes, and the number of this process.
      environ: the environment of this process.

    Returns:
      Process number -> None, or the value that a process has passed to `tell` instead of calling `meet`.

    Raises:
      UserError: the address does not resolve, process 0 cannot listen there, or two processes have the same number.
      LostPeer: a process has not registered in time, or has ended while the others registered.
    """
    key, number = next(filter(environ.get, _ADDRESSES)), next(filter(environ.get, _NUMBERS))
    try:
        if "KUBERNETES_SERVICE_HOST" not in environ:  # there a name resolves only after its pod has started
            retry(lambda: socket.getaddrinfo(meeting.host, meeting.port), TRY_SECONDS)
    except OSError as failure:
        got = f"{meeting.address}, which does not resolve ({failure.strerror})"
        fix = "the IP address, or correct the DNS entry"
        raise UserError(Problem(key, got=got, allowed="host:port of process 0", nearest=fix)) from failure
    try:
        return _answers(*roll_call(meeting, environ, None, MEET_SECONDS, needs_all=True))
    except Occupied as why:
        got = f"{meeting.address}, where process 0 cannot listen ({why})"
        fix = f"another port, or {number}=1 if process 0 is already running"
        raise UserError(Problem(key, got=got, allowed="a free port", nearest=fix)) from None
    except Refused as why:
        fix = f"start each process once, with its own {number}"
        raise UserError(Problem("processes", fault=why, allowed="each number once", nearest=fix)) from None
    except Unreachable as reason:
        raise LostPeer(f"{reason}, before all processes were connected") from None


def tell(meeting: Meeting, environ: Mapping[str, str], value: Json, seconds: float) -> None:
    """Sends a value to the other processes; a process that cannot take part in the job calls it instead of `meet`.

    The other processes call `meet`, which returns the value to them.

    Args:
      meeting: the address of process 0, the number of processes, and the number of this process.
      environ: the environment of this process.
      value: any JSON value except None, such as the reason.
      seconds: how long to wait for the other processes.

    Raises:
      Unreachable: process 0 cannot be reached, cannot listen, or rejects this process.
      UserError, OSError: this is process 0, and the address to listen at is wrong, or cannot be used.
    """
    _answers(*roll_call(meeting, environ, value, seconds, needs_all=False))


def _answers(call: "Hub | Member", said: Said) -> Said:
    """Closes the connection that `roll_call` has opened, and returns `said` unchanged.

    Takes the two results of `roll_call`. Process 0 first waits a few seconds until the other processes have closed
    their connections.

    Args:
      call: the open connection to process 0; in process 0, its connections to all other processes.
      said: process number -> the value that the process has sent.
    """
    with call:
        if isinstance(call, Hub):
            call.wait_for_the_end(_CONNECT_SECONDS)
    return said


def roll_call(
    meeting: Meeting, environ: Mapping[str, str], value: Json, seconds: float, *, needs_all: bool
) -> "tuple[Hub | Member, Said]":
    """Registers this process with all others; returns the open connection, and process number -> value of the process.

    Args:
      meeting: the address of process 0, the number of processes, and the number of this process.
      environ: the environment of this process.
      value: any JSON value of this process; None if it has nothing to send.
      seconds: how long to wait for the other processes; the missing processes are printed every 15 s.
      needs_all: whether a missing, rejected or ended process is an error, unless any process has sent a value other
        than None, which the others must get. If there is no error, the result lacks the value of such a process.

    Raises:
      Unreachable: process 0 cannot be reached or cannot listen (`Occupied`), or this process has another process's
        number (`Refused`); with `needs_all`, also if another process is missing, has ended, or was rejected.
    """
    begun = time.monotonic()

    def line(missing: Sequence[int], why: str = "") -> str:
        some = ", ".join(map(str, missing[:_NAMED])) + ", ..." * (len(missing) > _NAMED)
        where = f"{meeting.address} ({next(filter(environ.get, _ADDRESSES))})"
        return f"{time.monotonic() - begun:.0f} s for process {some} of {meeting.num_processes} at {where}{why}"

    def say(missing: Sequence[int], why: str = "") -> None:
        print(f"meshtrain: waiting: {line(missing, why)}", file=sys.stderr, flush=True)

    while meeting.index:
        member = None
        try:
            with contextlib.ExitStack() as opened:
                member = opened.enter_context(Member(meeting, min(LINE_SECONDS, begun + seconds - time.monotonic())))
                answers = member.exchange(_MEET, value, LINE_SECONDS, say)
                opened.pop_all()
                return member, answers
        except Unreachable as reason:
            if isinstance(reason, Refused) or (member and member.has_answer):
                raise
            own = f"{next(filter(environ.get, _NUMBERS))}={meeting.index}"
            why = f": another program answers, or a job that already has {own}" if member else f": {reason}"
            if (left := begun + seconds - time.monotonic() - _RETRY_SECONDS) <= 0:
                raise Unreachable(f"waited {line([0], why)}") from None
            say([0], why)
            time.sleep(min(left, LINE_SECONDS) if member else 0.0)  # immediate answers would cause a busy loop
    with contextlib.ExitStack() as opened:
        hub = opened.enter_context(_listening(meeting, environ))
        missing = hub.wait_for_all(begun + seconds, say)
        if needs_all and not hub.has_value(_MEET):
            if hub.refused:
                raise Refused(hub.refused[0])
            if gone := hub.ended():
                raise Unreachable(f"process {gone[0]} has ended")
            if missing:
                raise Unreachable(f"waited {line(missing)}")
        opened.pop_all()
    return hub, hub.exchange(_MEET, value, 0)


def _listening(meeting: Meeting, environ: Mapping[str, str]) -> "Hub":
    """Makes process 0 listen for the other processes, and returns its `Hub`; retries for 10 s if the port is in use.

    Raises:
      Refused: another process with the number 0 listens on the port.
      Occupied: the port cannot be used for another reason.
    """
    try:
        return retry(lambda: Hub(meeting, environ), TRY_SECONDS)
    except OSError as failure:
        try:
            with Member(meeting, 0.0) as second:
                second.exchange(_MEET, None, 0.0)
        except Unreachable as reason:
            raise reason if isinstance(reason, Refused) else Occupied(failure.strerror) from None
        raise


def retry(act: Callable[[], _T], seconds: float) -> _T:
    """Calls `act` repeatedly until it raises no OSError or UnicodeError, and returns its result.

    Args:
      act: a function without arguments, such as an attempt to connect.
      seconds: how long to retry.

    Raises:
      OSError: `act` still fails after this time; `strerror` is the reason of its last failure.
    """
    deadline = time.monotonic() + seconds
    while True:
        try:
            return act()
        except (OSError, UnicodeError) as failure:  # UnicodeError: an impossible host name
            if time.monotonic() + _RETRY_SECONDS > deadline:
                why = failure.strerror if isinstance(failure, OSError) else ""
                raise OSError(None, why or str(failure)) from failure
        time.sleep(_RETRY_SECONDS)


class Hub:
    """The connections of process 0 to all other processes: it accepts them, and distributes their messages.

    Attributes:
      refused: a line for each rejected process, with the reason.
    """

    def __init__(self, meeting: Meeting, environ: Mapping[str, str]) -> None:
        """Listens on the port of the meeting.

        Args:
          meeting: the address of process 0, and the number of processes.
          environ: the environment of this process; JAX_COORDINATOR_BIND_ADDRESS sets another address to listen at, as
            in JAX.

        Raises:
          OSError: another program uses the port, or the address does not belong to this machine.
        """
        self._meeting = meeting
        self._is_listening = True
        self._own: dict[int, _Connection] = {}
        self.refused: list[str] = []
        bound = Meeting(environ.get("JAX_COORDINATOR_BIND_ADDRESS") or f"[::]:{meeting.port}", 1, 0)
        host = "" if bound.host == "::" else bound.host
        on_both = not host and socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if on_both or ":" in host else socket.AF_INET
        self._server = socket.create_server((host, bound.port), family=family, dualstack_ipv6=on_both)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._server, selectors.EVENT_READ, self._server)

    def exchange(self, name: str, value: Json, seconds: float) -> Said:
        """Collects a message of all processes; returns process number -> value, and sends this result to all processes.

        Args:
          name: the name of the message.
          value: the value of process 0; any JSON value.
          seconds: how long to wait; processes that send no value in this time are not in the result.
        """
        self._pump(time.monotonic() + seconds, lambda: self._has_all(name))
        answers = {0: value, **{i: one.said[name] for i, one in sorted(self._own.items()) if name in one.said}}
        for one in self._own.values():
            one.send(name, answers)
        return answers

    def wait_for_all(self, deadline: float, say: Callable[[Sequence[int]], None]) -> list[int]:
        """Waits until all processes have registered; returns the numbers of the missing processes, or [].

        The wait ends early at the deadline, or if a process was rejected or has ended. Every 15 s the numbers of the
        missing processes are sent to the registered processes and passed to `say`.

        Args:
          deadline: the end of the wait, by `time.monotonic`.
          say: prints a line about the missing processes.
        """
        while True:
            self._pump(min(deadline, time.monotonic() + LINE_SECONDS), lambda: self._has_all(_MEET))
            here = [process for process, one in self._own.items() if _MEET in one.said]
            missing = sorted(set(range(1, self._meeting.num_processes)) - set(here))
            if not missing or self.refused or self.ended() or time.monotonic() >= deadline:
                return missing
            for one in self._own.values():
                one.send(_AWAITED, missing)
            say(missing)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Closes the connections."""
        for one in self._selector.get_map().values():
            one.data.close()
        self._selector.close()

    def stop_listening(self) -> None:
        """Releases the port, so that JAX can listen on it; the connections stay open."""
        self._is_listening = False
        self._selector.unregister(self._server)
        self._server.close()

    def wait_for_the_end(self, seconds: float) -> None:
        """Waits until the other processes have closed their connections, at most `seconds`.

        JAX would abort them if process 0 ended first.
        """
        self._pump(time.monotonic() + seconds, lambda: not any(one.is_open for one in self._own.values()))

    def ended(self) -> list[int]:
        """Returns the numbers of the registered processes that have ended, because their connection is closed."""
        return sorted(process for process, one in self._own.items() if not one.is_open)

    def has_value(self, name: str) -> bool:
        """Returns whether a process other than 0 has sent a value other than None in the message `name`."""
        return any(one.said.get(name) is not None for one in self._own.values())

    def _has_all(self, name: str) -> bool:
        """Returns whether each process that is still connected has sent the message `name`.

        While process 0 listens, all processes must also have registered.
        """
        is_complete = len(self._own) == self._meeting.num_processes - 1 or not self._is_listening
        return is_complete and all(name in one.said or not one.is_open for one in self._own.values())

    def _pump(self, deadline: float, is_done: Callable[[], bool]) -> None:
        """Accepts connections and reads messages until `is_done` is true, or until the deadline (`time.monotonic`)."""
        while not is_done() and (left := deadline - time.monotonic()) > 0:
            for key, _ in self._selector.select(left):
                if key.data is self._server:
                    connected, (address, *_) = self._server.accept()
                    one = _Connection(connected, self._meeting, address.removeprefix("::ffff:"))
                    self._selector.register(connected, selectors.EVENT_READ, one)
                else:
                    self._read(key.data)

    def _read(self, one: "_Connection") -> None:
        for message in one.read():
            if one in self._own.values() or self._registers(one, message):
                one.said[message["name"]] = message["value"]
        if not one.is_open:
            self._selector.unregister(one.socket)
            one.close()

    def _registers(self, one: "_Connection", message: _Message) -> bool:
        process, count, expected = message["process"], message["num_processes"], self._meeting.num_processes
        if count != expected:
            why = f"{one.address} was started as one of {count} processes, but process 0 as one of {expected}"
        elif process in self._own or not 0 < process < expected:
            why = f"{one.address} and another process both report that they are process {process}"
        else:
            self._own[process] = one
            one.send(_AWAITED, [])  # shows the process that it has not reached another program's port
            return True
        self.refused.append(why)
        one.send(_REFUSED, why)
        return False


class Member:
    """The connection of a process other than 0 to process 0.

    Attributes:
      has_answer: whether process 0 has answered, so that the connection is not to another program.
    """

    def __init__(self, meeting: Meeting, seconds: float) -> None:
        """Connects to process 0; retries, because process 0 may not listen yet.

        Args:
          meeting: the address of process 0, the number of processes, and the number of this process.
          seconds: how long to retry.

        Raises:
          Unreachable: process 0 cannot be reached; the text is the reason of the last attempt.
        """
        self._unread: list[_Message] = []
        self.has_answer = False
        deadline = time.monotonic() + seconds

        def connect() -> socket.socket:
            patience = max(0.1, min(_CONNECT_SECONDS, deadline - time.monotonic()))
            return socket.create_connection((meeting.host, meeting.port), timeout=patience)

        try:
            self._connection = _Connection(retry(connect, seconds), meeting, meeting.address)
        except OSError as failure:
            what = f": {failure.strerror}"
            if isinstance(failure.__cause__, TimeoutError):
                what = " does not answer"
            elif isinstance(failure.__cause__, ConnectionRefusedError):
                what = " refuses the connection: nothing listens there"
            raise Unreachable(f"{meeting.address}{what}") from None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Closes the connection."""
        self._connection.close()

    def exchange(
        self, name: str, value: Json, seconds: float, say: Callable[[Sequence[int]], None] = lambda _: None
    ) -> Said:
        """Sends a message of this process; returns process number -> value, the result of `Hub.exchange` in process 0.

        Args:
          name: the name of the message.
          value: the value of this process; any JSON value.
          seconds: how long to wait after each answer of process 0.
          say: a function that prints a line; called with the numbers of missing processes when process 0 sends them.

        Raises:
          Unreachable: process 0 has ended, does not answer in time, or rejects this process.
        """
        self._connection.send(name, value)
        deadline = time.monotonic() + seconds + _GRACE_SECONDS
        while True:
            message = self._receive(deadline, seconds)
            if message["name"] == _REFUSED:
                raise Refused(message["value"])
            self.has_answer = True
            if message["name"] == _AWAITED:
                if message["value"]:
                    say(message["value"])
                deadline = time.monotonic() + seconds + _GRACE_SECONDS
            elif message["name"] == name:
                return {int(process): each for process, each in message["value"].items()}

    def _receive(self, deadline: float, seconds: float) -> _Message:
        one = self._connection
        while not self._unread:
            if one.strange:
                raise Unreachable(f"{one.address} belongs to another program: {one.strange[:40]!r}")
            if not one.is_open:
                raise Unreachable("process 0 has ended")
            one.socket.settimeout(max(0.01, deadline - time.monotonic()))
            self._unread += one.read()
            if not self._unread and time.monotonic() > deadline:
                raise Unreachable(f"process 0 has not answered for {seconds + _GRACE_SECONDS:.0f} s")
        return self._unread.pop(0)


class _Connection:
    """A TCP connection to another process, which sends and receives messages.

    Attributes:
      socket: the connected socket.
      address: the address of the other process.
      said: message name -> the value of the newest received message with this name; set by `Hub`.
      is_open: whether the other process can still send messages.
      strange: a received line that is not a message; empty if none was received.
    """

    def __init__(self, connected: socket.socket, meeting: Meeting, address: str) -> None:
        self.socket = connected
        self.address = address
        self.said: dict[str, Json] = {}
        self.is_open = True
        self.strange = b""
        self._from = {"process": meeting.index, "num_processes": meeting.num_processes}
        self._buffer = b""

    def close(self) -> None:
        self.socket.close()

    def send(self, name: str, value: Json) -> None:
        if self.is_open:
            try:
                self.socket.settimeout(_CONNECT_SECONDS)
                self.socket.sendall(json.dumps({**self._from, "name": name, "value": value}).encode() + b"\n")
            except OSError:
                self.is_open = False

    def read(self) -> list[_Message]:
        """Reads once from the socket; returns the complete messages. A line that is no message ends the connection."""
        try:
            piece = self.socket.recv(2**16)
        except OSError:
            piece = b""
        *complete, self._buffer = (self._buffer + piece).split(b"\n")
        self.is_open = bool(piece) and len(self._buffer) <= _MOST_BYTES
        messages: list[_Message] = []
        for line in complete:
            try:
                message = read_json(line)
            except ValueError:
                message = None
            match message:
                case {"process": int(), "num_processes": int(), "name": str(), "value": _}:
                    messages.append(message)
                case _:
                    self.is_open, self.strange = False, line
        return messages
