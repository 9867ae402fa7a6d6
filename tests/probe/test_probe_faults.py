"""Faults of a whole job, planted in processes that are threads here: each is named, and nothing else is blamed."""

import socket
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from meshtrain.cli import flags
from meshtrain.errors import UserError
from meshtrain.launch import cluster, rendezvous
from meshtrain.probe import doctor
from meshtrain.probe.checks import job, machine_facts

TINY, MESH_3D = (str(Path(__file__).parents[2] / "configs" / name) for name in ("tiny.py", "3d.py"))
WELL = {"devices": (4, "H100"), "without_gpus": False, "times": {"data": (2, 1e-3)}, "wrong": [], "pairs": {}}
HOST = socket.gethostname()
BUCKET = "--config.checkpoint.directory=gs://bucket/run"
NOT_RUN = "collectives    not run; do: correct the errors"


def process(*words, limit=20, software=None, clock=0.0, ran=WELL, does="", **environ):
    return SimpleNamespace(
        words=[f"--limit={limit}", *words], software=software or {}, clock=clock, ran=ran, does=does, environ=environ
    )


FAULTS = [
    # what is wrong, the processes (None: not started), what each problem's line says, in order
    ("nothing", [process(), process()], []),
    ("another source tree", [process(), process(software={"meshtrain's source": "b"})],
     [f"versions       process 1 ({HOST}): meshtrain's source is b, but a in process 0; do: install", NOT_RUN]),
    ("another optax", [process(), process(software={"optax": "9"})],
     [f"versions       process 1 ({HOST}): optax is 9, but not set in process 0", NOT_RUN]),
    ("a folder that cannot be written", [process("--workdir=/proc/run"), process("--workdir=/proc/run")],
     [f"workdir        processes 0 ({HOST}), 1 ({HOST}): --workdir: got '/proc/run', which is not writable"]),
    ("a taken port", [process(does="strange"), None],
     [f"port           process 0 ({HOST}): PORT: Address already in use"]),
    ("a name that does not resolve", [None, process(JAX_COORDINATOR_ADDRESS="no.such.invalid:1", limit=1)],
     [f"coordinator    process 1 ({HOST}): no.such.invalid: ", "port           process 1"]),
    ("an address that does not answer", [None, process(limit=1)],
     [f"port           process 1 ({HOST}): waited 1 s for process 0 of 2 at 127.0.0.1:PORT (JAX_COORDINATOR_ADDRESS): "
      "127.0.0.1:PORT refuses the connection: nothing listens there"]),
    ("different numbers of processes", [process(JAX_NUM_PROCESSES="3"), process()],
     [f"registered     process 1 ({HOST}): 127.0.0.1 was started as one of 2 processes, but process 0 as one of 3",
      "registered     127.0.0.1 was started as one of 2 processes, but process 0 as one of 3; do: start",
      "registered     processes 1, 2 of 3 did not register", NOT_RUN]),
    ("XLA_FLAGS", [process(), process(XLA_FLAGS="--a")],
     [f"environment    process 1 ({HOST}): XLA_FLAGS is --a, but not set in process 0; do: set the same value in all"]),
    ("x64", [process(), process(JAX_ENABLE_X64="1")],
     [f"environment    process 1 ({HOST}): JAX_ENABLE_X64 is 1, but not set in process 0"]),
    ("devices", [process(), process(ran=WELL | {"devices": (3, "H100")})],
     [f"devices        process 1 ({HOST}): JAX sees 3 x H100, but 4 x H100 are expected; do: check nvidia-smi"]),
    ("platform", [process(), process(JAX_PLATFORMS="cpu,tpu", ran=WELL | {"devices": (4, "cpu")})],
     [f"environment    process 1 ({HOST}): JAX_PLATFORMS is cpu,tpu, but cpu in process 0",
      f"devices        process 1 ({HOST}): JAX sees 4 x cpu, but 4 x H100"]),
    ("stopped", [process(limit=1), process(does="stops")],
     [f"collectives    process 1 ({HOST}): it has ended or does not answer; do: read its output", NOT_RUN]),
    ("killed", [process(), process(does="ends")],
     [f"collectives    process 1 ({HOST}): it has ended or does not answer; do: read its output", NOT_RUN]),
    ("clocks", [process(), process(clock=5.0)],
     [f"clock          process 1 ({HOST}): its clock is 5.0 s ahead of process 0's; do: start chrony"]),
    ("a process that hangs", [process(does="waits", limit=2), process(does="hangs", limit=2)],
     [f"collectives    process 1 ({HOST}): the start of JAX has not ended in 2 s; other processes wait for it; do: "
      "NCCL_DEBUG"]),
    ("a process that fails", [process(does="waits", limit=2), process(does="fails", limit=2)],
     [f"collectives    process 1 ({HOST}): RuntimeError: no device; do: run doctor on only this machine"]),
    ("a process that never comes", [process(limit=1), None],
     ["registered     process 1 of 2 did not register in 1 s; do: read the output", NOT_RUN]),
    ("two with number 0", [process(), process(JAX_PROCESS_ID="0")],
     ["127.0.0.1 and another process both report that they are process 0; do: start each process once, with"] * 2
     + ["registered     process 1 of 2 did not register", NOT_RUN]),
    ("two with number 1", [process(JAX_NUM_PROCESSES="3"), process(JAX_NUM_PROCESSES="3"),
                           process(JAX_NUM_PROCESSES="3", JAX_PROCESS_ID="1")],
     ["127.0.0.1 and another process both report that they are process 1; do: start each process once, with"] * 2
     + ["registered     process 2 of 3 did not register", NOT_RUN]),
    ("a workdir that is a file", [process(f"--workdir={TINY}"), process(f"--workdir={TINY}")],
     [f"workdir        processes 0 ({HOST}), 1 ({HOST}): --workdir: got '{TINY}': '{TINY}' is not a folder but a"]),
    ("a workdir that is a device", [process("--workdir=/dev/null"), process("--workdir=/dev/null")],
     ["got '/dev/null': '/dev/null' is not a folder but a device; allowed: a folder that can be written; nearest"]),
    ("another workdir with the same parent", [process(), process("--workdir=other")],
     [f"configuration  process 1 ({HOST}): workdir is 'FOLDER/other', but 'FOLDER/run' in process 0; do: start all",
      NOT_RUN]),
    ("workdirs with different parents", [process(), process("--workdir=here/run")],
     [f"shared         process 0 ({HOST}): FOLDER does not contain the file of process 1: "
     "it is not the same folder on all machines; do: use a workdir",
      f"shared         process 1 ({HOST}): FOLDER/here does not contain the file of process 0: it is not the "
      "same folder on all machines",
      f"configuration  process 1 ({HOST}): workdir is 'FOLDER/here/run', but 'FOLDER/run' in process 0", NOT_RUN]),
    ("workdirs of their own, which meet in a bucket",
     [process(BUCKET), process(BUCKET, "--workdir=here/run")], []),
    ("another configuration", [process(f"--config={TINY}"), process(f"--config={MESH_3D}")],
     [f"configuration  process 1 ({HOST}): checkpoint.every is 50, but 0 in process 0"] + [""] * 99),
    ("another field", [process(f"--config={TINY}"), process(f"--config={TINY}", "--config.seed=7")],
     [f"configuration  process 1 ({HOST}): seed is 7, but 0 in process 0; do: start all processes with the", NOT_RUN]),
    ("another mesh", [process("--config.mesh.data=2", "--config.mesh.fsdp=4"),
                      process("--config.mesh.data=4", "--config.mesh.fsdp=2")],
     [f"configuration  process 1 ({HOST}): mesh.data is 4, but 2 in process 0",
      f"configuration  process 1 ({HOST}): mesh.fsdp is 2, but 4 in process 0", NOT_RUN]),
    ("what the job refuses", [process(f"--config={TINY}"), process(f"--config={TINY}", "--config.sed=7")],
     [f"job            process 1 ({HOST}): sed: unknown key", NOT_RUN]),
    ("junk of a scheduler",
     [None, process(SLURM_STEP_NUM_TASKS="junk", JAX_NUM_PROCESSES=None, JAX_PROCESS_ID=None)],
     ["SLURM_STEP_NUM_TASKS: got junk; allowed: a number below"]),
    ("a port that is no number", [None, process(JAX_COORDINATOR_ADDRESS="localhost:http")],
     ["JAX_COORDINATOR_ADDRESS=localhost:http"]),
]  # fmt: skip


@pytest.fixture
def impatient(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()
    monkeypatch.setattr(rendezvous, "TRY_SECONDS", 0.1)
    monkeypatch.setattr(rendezvous, "LINE_SECONDS", 0.5)
    monkeypatch.setattr(rendezvous, "_GRACE_SECONDS", 2.0)
    monkeypatch.setattr(doctor, "_END_SECONDS", 0.1)
    monkeypatch.setattr(job, "exercised", exercised)
    monkeypatch.setattr(machine_facts, "_WRITTEN_BYTES", 1)
    monkeypatch.setattr(machine_facts, "_LOOK_SECONDS", 0.3)


def exercised(arguments, begin):
    """In place of what JAX does."""
    if arguments.one.does == "fails":
        raise RuntimeError("no device")
    if arguments.one.does == "waits":
        begin("an all-reduce on data")
    if arguments.one.does in ("waits", "hangs"):
        arguments.never.wait()
    return arguments.one.ran


def doctor_of(index, one, port, never):
    """Runs the doctor of a process in this thread."""
    own = {"PATH": "/usr/bin", "JAX_PLATFORMS": "cpu", "JAX_COMPILATION_CACHE_DIR": ".", "JAX_NUM_PROCESSES": "2"}
    own |= {"JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}", "JAX_PROCESS_ID": str(index)} | one.environ
    environ = {name: value for name, value in own.items() if value is not None}
    arguments = flags.arguments(["--workdir=run", *one.words], doctor.parser())
    arguments.one, arguments.never = one, never
    try:
        where = cluster.meeting(environ)
        if one.does in ("stops", "ends"):
            call, _ = rendezvous.roll_call(where, environ, doctor._introduction([], environ), 5, needs_all=False)
            with call:
                never.wait(0 if one.does == "ends" else None)
            return
        if one.does == "strange":
            with socket.create_server(("", port)):
                doctor.diagnose(arguments, where, environ)
            return
        doctor.diagnose(arguments, where, environ)
    except UserError as refusal:
        print("\n".join(f"error    {line}" for line in refusal.problems))


@pytest.mark.parametrize(("processes", "expected"), [each[1:] for each in FAULTS], ids=[each[0] for each in FAULTS])
def test_each_fault_is_named_and_nothing_else_is_blamed(processes, expected, impatient, monkeypatch, capsys, tmp_path):
    def of_thread():
        return processes[int(threading.current_thread().name)]

    monkeypatch.setattr(machine_facts, "software", lambda: {"meshtrain's source": "a"} | of_thread().software)
    clock = SimpleNamespace(time=lambda: time.time() + of_thread().clock, monotonic=time.monotonic, sleep=time.sleep,
                            time_ns=time.time_ns)  # fmt: skip
    monkeypatch.setattr(doctor, "time", clock)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    never = threading.Event()
    started = [(index, one) for index, one in enumerate(processes) if one]
    threads = [threading.Thread(target=doctor_of, args=(*each, port, never), name=str(each[0])) for each in started]
    for thread in threads:
        thread.start()
    for thread, (_, one) in reversed(list(zip(threads, started, strict=True))):
        if one.does != "stops":
            thread.join(60)
    never.set()
    for thread in threads:
        thread.join(60)
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith(("error", "warning"))]
    wanted = [line.replace("PORT", str(port)).replace("FOLDER", str(tmp_path)) for line in expected]
    for line, part in zip(said, wanted, strict=False):
        assert part in line
    assert len(said) == len(wanted) or wanted[-1] == "", said
