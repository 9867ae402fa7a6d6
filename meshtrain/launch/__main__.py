"""Starts a program in several processes on this machine.

python -m meshtrain launch --processes=2 --devices=4 -- -m meshtrain train --config=configs/3d.py
"""

import argparse
import os
import sys
from collections.abc import Sequence

from meshtrain.cli.flags import program
from meshtrain.errors import Problem, UserError, nearest, refuse, run
from meshtrain.launch import local_processes


def parser() -> argparse.ArgumentParser:
    """Returns the parser of the arguments before the `--`."""
    result = argparse.ArgumentParser(
        prog=f"{program()} launch",
        description="Starts a program in several connected processes, and ends them together.",
        usage="%(prog)s --processes=N [--devices=N] [--restarts=N [--min-processes=N]] -- -m meshtrain train ...",
        exit_on_error=False,
        allow_abbrev=False,
    )
    result.add_argument("--processes", type=int, help="number of processes (default: one for each GPU)")
    result.add_argument("--devices", type=int, help="CPU devices that each process simulates")
    result.add_argument("--restarts", type=int, default=0, help="how often all processes are restarted after a failure")
    result.add_argument(
        "--min-processes",
        type=int,
        help="continue with the remaining processes after a failure, at least N (mesh.data=-1)",
    )
    seconds = local_processes.Job.back_seconds
    result.add_argument(
        "--back-seconds",
        type=int,
        help=f"seconds after which all processes, including failed processes, are restarted ({seconds:.0f})",
    )
    return result


def job(argv: Sequence[str], gpus: Sequence[str]) -> tuple[local_processes.Job, int]:
    """Returns the job that a command line describes, and the maximum number of restarts.

    Args:
      argv: the arguments of `launch`, then `--` and the arguments of `python`.
      gpus: identifiers of the GPUs that may be used; empty if there are none.

    Raises:
      UserError: all problems of the arguments.
    """
    own = list(argv[: argv.index("--")]) if "--" in argv else list(argv)
    command = tuple(argv[len(own) + 1 :])
    try:
        arguments, unknown = parser().parse_known_args(own)
    except argparse.ArgumentError as error:
        flag = error.argument_name
        raise UserError(Problem(flag, fault=error.message, allowed="a whole number", nearest=f"{flag}=2")) from None
    on_gpus = bool(gpus) and arguments.devices is None  # --devices asks for simulated CPU devices
    num_processes: int = len(gpus) if arguments.processes is None else arguments.processes
    limits = {
        "processes": (1, local_processes.MAX_PROCESSES),
        "devices": (1, local_processes.MAX_SIMULATED),
        "restarts": (0 if arguments.min_processes is None else 1, sys.maxsize),
        "min_processes": (1, max(num_processes, 1)),
        "back_seconds": (1, sys.maxsize),
    }
    problems = _unknown_words(unknown, [_flag(name) for name in limits])
    if not command:
        fix = "-- -m meshtrain train --config=3d"
        problems.append(Problem("program", got="nothing after --", allowed="arguments for python", nearest=fix))
    for name, (least, most) in limits.items():
        value = getattr(arguments, name)
        if value is not None and not least <= value <= most:
            words, limit = ("at least", least) if value < least else ("at most", most)
            problems.append(Problem(_flag(name), got=value, allowed=f"{words} {limit}", nearest=limit))
    if not num_processes and arguments.processes is None:
        problems.append(Problem("--processes", got="nothing", allowed="at least 1", nearest="--processes=2"))
    elif on_gpus and num_processes > len(gpus):
        allowed = f"at most the {len(gpus)} GPUs of this machine, one for each"
        fix = f"{len(gpus)}, or --devices=N for simulated CPU devices"
        problems.append(Problem("--processes", got=num_processes, allowed=allowed, nearest=fix))
    refuse(problems)
    wanted = local_processes.Job(
        command,
        num_processes,
        arguments.devices or 0,
        tuple(gpus) if on_gpus else (),
        arguments.min_processes or 0,
        arguments.back_seconds or local_processes.Job.back_seconds,
    )
    return wanted, arguments.restarts


def _unknown_words(words: Sequence[str], flags: Sequence[str]) -> list[Problem]:
    allowed = f"{', '.join(flags)}, then -- and the program"
    fixes = [nearest(word.partition("=")[0], flags) for word in words]
    return [
        Problem(word, fault="unknown", allowed=allowed, fix=fix, nearest="-- before the program")
        for word, fix in zip(words, fixes, strict=True)
    ]


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def main(argv: Sequence[str]) -> int:
    """Starts the processes and waits for them; returns the exit code of the first process that failed, or 0.

    Args:
      argv: the arguments of `launch`, then `--` and the arguments of `python`.
    """
    if set(argv[: argv.index("--")] if "--" in argv else argv) & {"-h", "--help"}:
        parser().print_help()
        return 0
    wanted, num_restarts = job(argv, local_processes.gpus(os.environ))
    return local_processes.run(wanted, num_restarts)


if __name__ == "__main__":
    run(lambda: main(sys.argv[1:]))
