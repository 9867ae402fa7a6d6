"""Messages between the processes of a job before JAX connects them: over TCP, through process 0, each with a limit.

JAX ends a process without a word about the others when one of them is missing. Here process 0 listens at the port that
JAX will listen at. The others connect, and stay connected when it has stopped listening, so that process 0 can say who
is missing or stuck whatever JAX does. A message is one line of JSON. `roll_call` is the rendezvous of the doctor,
of `meet`, with which a run starts, and of `tell`, for a process that cannot start.
"""

import contextlib
import json
import selectors
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Self, TypeVar

from meshtrain.errors import LostPeer, UserError
from meshtrain.files import Json, read_json
from meshtrain.launch.cluster import Meeting

LINE_SECONDS = 15.0  # between two lines about those that are awaited
TRY_SECONDS = 10.0  # for a port that was in use a moment ago, and for name servers
MEET_SECONDS = 300.0  # as long as JAX waits
_ADDRESSES = ("JAX_COORDINATOR_ADDRESS", "SLURM_STEP_NODELIST", "OMPI_MCA_orte_hnp_uri", "KUBERNETES_SERVICE_HOST")
_NUMBERS = ("JAX_PROCESS_ID", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "JOB_COMPLETION_INDEX")
_NAMED = 8  # processes that a line names
_MOST_BYTES = 2**22  # of a message: more is from something else
_RETRY_SECONDS = 0.2
_CONNECT_SECONDS = 5.0
_GRACE_SECONDS = 10.0  # process 0 waits for the others first, and answers then
_MEET, _AWAITED, _REFUSED = "meet", "awaited", "refused"
_T = TypeVar("_T")
_Message = Mapping[str, Json]
Said = dict[int, Json]  # process -> its value


class Unreachable(Exception):
    """Process 0 cannot be reached, or does not answer; the text is what was seen."""


class Refused(Unreachable):
    """Two processes say that they are the same one, or that the job has different sizes; the text names them."""


class Occupied(Unreachable):
    """Process 0 cannot listen at its port; the text is the reason."""


def meet(meeting: Meeting, environ: Mapping[str, str]) -> Said:
    """Waits until all processes of a job are there, five minutes at most; prints every 15 s for whom.

    Returns:
      Process -> None, or the value with which it called `tell`.

    Raises:
      UserError: the address does not resolve, process 0 cannot listen there, or two processes have one number.
      LostPeer: a process has not come, or has ended meanwhile.
    """
    got, number = f"{next(filter(environ.get, _ADDRESSES))}: got {meeting.address}", next(filter(environ.get, _NUMBERS))
    try:
        if "KUBERNETES_SERVICE_HOST" not in environ:  # there a name resolves once its pod has started
            tried(lambda: socket.getaddrinfo(meeting.host, meeting.port), TRY_SECONDS)
    except OSError as failure:
        fix = "allowed: host:port of process 0; nearest: its IP address, or mend DNS"
        raise UserError(f"{got}, which does not resolve ({failure.strerror}); {fix}") from failure
    try:
        return _answers(*roll_call(meeting, environ, None, MEET_SECONDS, needs_all=True))
    except Occupied as why:
        fix = f"allowed: a port that is free; nearest: another port, or {number}=1 if process 0 is there already"
        raise UserError(f"{got}, where process 0 cannot listen ({why}); {fix}") from None
    except Refused as why:
        fix = f"start each process once, with its own {number}"
        raise UserError(f"processes: {why}; allowed: each number once; nearest: {fix}") from None
    except Unreachable as reason:
        raise LostPeer(f"{reason}, before all processes had met") from None


def tell(meeting: Meeting, environ: Mapping[str, str], value: Json, seconds: float) -> None:
    """Passes a value, which is not None, to the processes that call `meet`: this process cannot take part in the job.

    Raises:
      Unreachable: see `roll_call`.
      UserError, OSError: see `Hub`.
    """
    _answers(*roll_call(meeting, environ, value, seconds, needs_all=False))


def _answers(call: "Hub | Member", said: Said) -> Said:
    """Returns the answers of a roll call, whose connections it closes."""
    with call:
        if isinstance(call, Hub):
            call.wait_for_the_end(_CONNECT_SECONDS)
    return said


def roll_call(
    meeting: Meeting, environ: Mapping[str, str], value: Json, seconds: float, *, needs_all: bool
) -> "tuple[Hub | Member, Said]":
    """Returns the open connection to the others, and process -> value; prints every 15 s who is awaited.

    Args:
      meeting: where the processes meet.
      environ: of this process.
      value: of this process, as JSON holds it.
      seconds: how long to wait for the others.
      needs_all: whether a process that is missing, refused or has ended is an error; without, the others go on. A value
        of another process that is not None comes before these errors.

    Raises:
      Unreachable: process 0 cannot be reached or cannot listen (`Occupied`), or this process has the number of another
        (`Refused`); if all are needed, also if a process has not come, has ended, or has the number of another.
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
            why = f": another program answers there, or a job that has its {own} already" if member else f": {reason}"
            if (left := begun + seconds - time.monotonic() - _RETRY_SECONDS) <= 0:
                raise Unreachable(f"waited {line([0], why)}") from None
            say([0], why)
            time.sleep(min(left, LINE_SECONDS) if member else 0.0)  # what answers at once would be asked without end
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
    """Returns process 0's side of a roll call; Refused where another process 0 listens, else Occupied."""
    try:
        return tried(lambda: Hub(meeting, environ), TRY_SECONDS)
    except OSError as failure:
        try:
            with Member(meeting, 0.0) as second:
                second.exchange(_MEET, None, 0.0)
        except Unreachable as reason:
            raise reason if isinstance(reason, Refused) else Occupied(failure.strerror) from None
        raise


def tried(act: Callable[[], _T], seconds: float) -> _T:
    """Returns what `act` returns; raises OSError, its `strerror` the reason, if that fails for so many seconds."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            return act()
        except (OSError, UnicodeError) as failure:  # UnicodeError: no name can be like that
            if time.monotonic() + _RETRY_SECONDS > deadline:
                why = failure.strerror if isinstance(failure, OSError) else ""
                raise OSError(None, why or str(failure)) from failure
        time.sleep(_RETRY_SECONDS)


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
        """Returns process -> value, of those that answered in time, and tells them the same."""
        self._pump(time.monotonic() + seconds, lambda: self._has_all(name))
        answers = {0: value, **{i: one.said[name] for i, one in sorted(self._own.items()) if name in one.said}}
        for one in self._own.values():
            one.send(name, answers)
        return answers

    def wait_for_all(self, deadline: float, say: Callable[[Sequence[int]], None]) -> list[int]:
        """Returns who has not come when the time is over, or a process was refused or has ended; tells all who wait."""
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
        """Leaves the port, so that JAX can listen there; the connections stay."""
        self._is_listening = False
        self._selector.unregister(self._server)
        self._server.close()

    def wait_for_the_end(self, seconds: float) -> None:
        """Waits until the others have ended: JAX would abort them if this process ended first."""
        self._pump(time.monotonic() + seconds, lambda: not any(one.is_open for one in self._own.values()))

    def ended(self) -> list[int]:
        """Returns the processes whose connection is closed."""
        return sorted(process for process, one in self._own.items() if not one.is_open)

    def has_value(self, name: str) -> bool:
        """Returns whether another process has sent a value other than None."""
        return any(one.said.get(name) is not None for one in self._own.values())

    def _has_all(self, name: str) -> bool:
        """Returns whether nobody is left who could still say this."""
        is_complete = len(self._own) == self._meeting.num_processes - 1 or not self._is_listening
        return is_complete and all(name in one.said or not one.is_open for one in self._own.values())

    def _pump(self, deadline: float, is_done: Callable[[], bool]) -> None:
        """Reads what arrives until something is done, or the time is over."""
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
            why = f"{one.address} was started as one of {count} processes, process 0 as one of {expected}"
        elif process in self._own or not 0 < process < expected:
            why = f"{one.address} says that it is process {process}, and so does another process"
        else:
            self._own[process] = one
            one.send(_AWAITED, [])  # the process knows that it is not at another program's port
            return True
        self.refused.append(why)
        one.send(_REFUSED, why)
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
        self._unread: list[_Message] = []
        self.has_answer = False
        deadline = time.monotonic() + seconds

        def connect() -> socket.socket:
            patience = max(0.1, min(_CONNECT_SECONDS, deadline - time.monotonic()))
            return socket.create_connection((meeting.host, meeting.port), timeout=patience)

        try:
            self._connection = _Connection(tried(connect, seconds), meeting, meeting.address)
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
        """Returns what `Hub.exchange` returns in process 0.

        Args:
          name: of the message.
          value: of this process.
          seconds: to wait after each answer of process 0.
          say: told who is awaited.

        Raises:
          Unreachable: process 0 has ended, does not answer in time, or refuses this process.
        """
        self._connection.send(name, value)
        deadline = time.monotonic() + seconds + _GRACE_SECONDS
        while True:
            message = self._received(deadline, seconds)
            if message["name"] == _REFUSED:
                raise Refused(message["value"])
            self.has_answer = True
            if message["name"] == _AWAITED:
                if message["value"]:
                    say(message["value"])
                deadline = time.monotonic() + seconds + _GRACE_SECONDS
            elif message["name"] == name:
                return {int(process): each for process, each in message["value"].items()}

    def _received(self, deadline: float, seconds: float) -> _Message:
        one = self._connection
        while not self._unread:
            if one.strange:
                raise Unreachable(f"{one.address} is another program's: {one.strange[:40]!r}")
            if not one.is_open:
                raise Unreachable("process 0 has ended")
            one.socket.settimeout(max(0.01, deadline - time.monotonic()))
            self._unread += one.read()
            if not self._unread and time.monotonic() > deadline:
                raise Unreachable(f"process 0 has not answered for {seconds + _GRACE_SECONDS:.0f} s")
        return self._unread.pop(0)


class _Connection:
    """One end of a connection.

    Attributes:
      address: of the other end.
      said: the newest message of each name.
      strange: a line that is no message; empty: none came.
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
        """Returns the messages that are complete; something else than a message ends the connection."""
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
