"""Writes a profiler trace of the steps in `profile.steps`, for XProf, TensorBoard or Perfetto."""

import contextlib
import dataclasses
import os
import pathlib
import re
import sys

import jax

from meshtrain.errors import Problem, UserError, refusals
from meshtrain.options import option
from meshtrain.sharding.trees import Arrays


@dataclasses.dataclass(frozen=True)
class ProfileOptions:
    """Options of the profiler: the training steps to trace."""

    steps: str = option("", "first and last step to trace, as in 10,13 (or one step, as in 10); empty: no trace")


def check(options: ProfileOptions) -> list[Problem]:
    """Returns an error line for each error in the options."""
    return refusals(first_and_last_step, options)


def first_and_last_step(options: ProfileOptions) -> tuple[int, int] | None:
    """Returns the first and the last step to trace, counted from 1, or None for no trace.

    Raises:
      UserError: the text is neither one step nor two ascending steps.
    """
    text = options.steps.strip()
    if not text:
        return None
    # Also accepts parentheses: a command line may pass 10,13 as the text of a tuple.
    match = re.fullmatch(r"\(?\s*(\d{1,10})\s*(?:,\s*(\d{1,10})\s*)?,?\s*\)?", text)
    allowed = "FIRST,LAST with 1 <= FIRST <= LAST, or one step"
    if match is None:
        raise UserError(Problem("profile.steps", got=f"'{options.steps}'", allowed=allowed, nearest="10,13"))
    first = int(match[1])
    last = int(match[2]) if match[2] else first
    if not 1 <= first <= last:
        low, high = sorted((max(first, 1), max(last, 1)))
        raise UserError(Problem("profile.steps", got=f"'{options.steps}'", allowed=allowed, nearest=f"{low},{high}"))
    return first, last


class Profiler:
    """Traces the chosen steps, each from its dispatch to its result.

        with closing(Profiler(options, workdir)) as profiler:
            for step in ...:
                profiler.before(step)
                state, result = train_step(state, batch)
                profiler.after(step, result)

    Does nothing if there are no steps to trace. The loop waits for the step before the trace and for the last traced
    step, which causes two short stalls. Processes that should write no trace get options without steps.
    """

    def __init__(self, options: ProfileOptions, directory: str | os.PathLike[str]) -> None:
        """Reads the options; nothing is written before the first step to trace.

        Args:
          options: which steps to trace.
          directory: the run's folder; the trace is written to its `profile/`.

        Raises:
          UserError: the options are invalid.
        """
        self._steps = first_and_last_step(options)
        self.directory = pathlib.Path(directory) / "profile"
        self._last_result: Arrays = None
        self._is_tracing = False
        self._annotation = contextlib.ExitStack()

    def before(self, step: int) -> None:
        """Starts the trace if this is the first step to trace (in a resumed run, the first remaining step)."""
        if self._steps is None or not self._steps[0] <= step <= self._steps[1]:
            return
        if not self._is_tracing:
            # Otherwise the trace would start with the rest of the previous step.
            jax.block_until_ready(self._last_result)
            self._start()
        if self._is_tracing:
            self._annotation.enter_context(jax.profiler.StepTraceAnnotation("step", step_num=step))

    def after(self, step: int, result: Arrays) -> None:
        """Ends the trace if this was the last step to trace, after waiting for its result.

        Args:
          step: the number of the step that was just dispatched.
          result: the result of the step: arrays that are not donated to a later step.
        """
        if self._steps is None:
            return
        self._annotation.close()
        self._last_result = result
        if step >= self._steps[1]:
            self._last_result = None
            if self._is_tracing:
                jax.block_until_ready(result)
                self.close()

    def close(self) -> None:
        """Ends a running trace and writes its file. The method may be called several times."""
        self._annotation.close()
        if not self._is_tracing:
            return
        self._is_tracing, self._steps = False, None
        try:
            jax.profiler.stop_trace()
        except (OSError, RuntimeError) as error:
            self._give_up(error)
        else:
            print(f"meshtrain: trace written to {self.directory} (xprof --logdir={self.directory})", file=sys.stderr)

    def _start(self) -> None:
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            jax.profiler.start_trace(self.directory)
            self._is_tracing = True
        except (OSError, RuntimeError) as error:
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        # A failed trace must not end the run.
        self._steps = None
        print(f"meshtrain: WARNING: no trace in {self.directory}: {error}; training continues", file=sys.stderr)
