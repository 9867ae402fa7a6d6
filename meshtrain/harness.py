"""A run's weights as a model of the evaluation harness `lm_eval` (package lm-eval, the extra `eval`).

import lm_eval
from meshtrain.harness import language_model

lm_eval.simple_evaluate(model=language_model("runs/tiny"), tasks=["lambada_openai"])
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from meshtrain.run.requests import opened
from meshtrain.words.errors import UserError


def language_model(workdir: str | Path, *words: str, step: int | None = None) -> Any:
    """Returns a run's weights as an `lm_eval.api.model.LM`; for the arguments see `run.requests.opened`.

    Raises:
      UserError: see `run.requests.opened`; or the package lm-eval is missing.
    """
    try:
        from lm_eval.api.model import LM
    except ModuleNotFoundError as error:
        raise UserError(
            f"lm_eval: got no package '{error.name}'; allowed: the extra eval, which installs it; nearest: pip install "
            "'meshtrain[eval]'"
        ) from error
    answered = opened(workdir, *words, step=step)

    class LanguageModel(LM):
        """A run's weights; each request is an `lm_eval.api.instance.Instance`."""

        @property
        def tokenizer_name(self) -> str:
            """Returns the name under which the harness caches requests."""
            return answered.tokenizer.name

        def loglikelihood(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
            """Returns (log probability, whether greedy) for each (context, continuation)."""
            found = answered.likelihoods([request.args for request in requests])
            return [(one.log_probability, one.is_greedy) for one in found]

        def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
            """Returns the log probability for each (text,)."""
            return answered.rolling([request.args[0] for request in requests])

        def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
            """Returns the text for each (prompt, options)."""
            return answered.generated([request.args for request in requests])

    return LanguageModel()
