"""Wraps a run's weights as a model for the evaluation harness `lm_eval` (package lm-eval, the extra `eval`).

import lm_eval
from meshtrain.harness import language_model

lm_eval.simple_evaluate(model=language_model("runs/tiny"), tasks=["lambada_openai"])
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from meshtrain.assembly.assemble import Assembly
from meshtrain.cli import flags
from meshtrain.data.tokenizer import Tokenizer
from meshtrain.errors import Problem, UserError, refuse, unknown
from meshtrain.files import Json
from meshtrain.generation.answers import Wanted, answers, fitting
from meshtrain.generation.sampling import Sampling
from meshtrain.models.task import Params
from meshtrain.run import generating, likelihoods
from meshtrain.run.dataset import text_of
from meshtrain.run.existing_run import assemble_run, configuration, restore_weights
from meshtrain.run.likelihoods import Likelihood, Score

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance
    from lm_eval.api.model import LM


def language_model(workdir: str | Path, *words: str, step: int | None = None) -> "LM":
    """Returns a run's weights as an `lm_eval.api.model.LM`.

    Args:
      workdir: the run's folder.
      words: overrides of the run's configuration as on a command line, such as `--config.mesh.tensor=4`.
      step: the step of the checkpoint; None: the newest checkpoint.

    Raises:
      UserError: there is no such run or checkpoint, the run is not a text model, or the package lm-eval is missing.
    """
    try:
        from lm_eval.api.model import LM
    except ModuleNotFoundError as error:
        raise UserError(
            Problem(
                "lm_eval",
                got=f"no package '{error.name}'",
                allowed="the extra eval, which installs it",
                nearest="pip install 'meshtrain[eval]'",
            )
        ) from error
    answered = open_requests(workdir, *words, step=step)

    class LanguageModel(LM):
        """A run's weights with the interface of `LM`; a request is an `lm_eval.api.instance.Instance`."""

        @property
        def tokenizer_name(self) -> str:
            """Returns the tokenizer's name, under which the harness caches requests."""
            return answered.tokenizer.name

        def loglikelihood(self, requests: Sequence["Instance"], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
            """Returns, for each request, the log probability of its continuation, and whether greedy decoding gives it.

            The arguments of a request are the texts (context, continuation).
            """
            likelihoods = answered.likelihoods([request.args for request in requests])
            return [(one.log_probability, one.is_greedy) for one in likelihoods]

        def loglikelihood_rolling(self, requests: Sequence["Instance"], disable_tqdm: bool = False) -> list[float]:
            """Returns the log probability of the text of each request."""
            return answered.rolling([request.args[0] for request in requests])

        def generate_until(self, requests: Sequence["Instance"], disable_tqdm: bool = False) -> list[str]:
            """Returns the generated text for each request, whose arguments are (prompt, options)."""
            return answered.generate([request.args for request in requests])

    return LanguageModel()


MOST = 1_000_000  # the maximum length, temperature or `top_k` in a request
MAX_GEN_TOKS = 256  # default of a request, the same as in the harness's models
_LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")  # the first given name is used
_GIVEN = {"until": (), "do_sample": False, "temperature": 1.0, "top_k": 0, "top_p": 1.0}


@dataclasses.dataclass(frozen=True)
class Requests:
    """Answers the harness's requests: likelihoods of continuations, likelihoods of complete texts, generated texts.

    Attributes:
      assembly: the run's assembly on a mesh without a pipeline; `likelihoods.problems_of_task` accepts its task.
      params: the weights, with the shapes and shardings of `assembly.state.params`.
      tokenizer: the tokenizer of the run. A text without a context is scored after the tokenizer's `begin` ids, or, if
        there are none, after the end-of-document token. After the end-of-document token, the first token of a text has
        a low probability, because training does not predict the first token of a document.
      score: the function that `likelihoods.scorer` returns for the assembly; it is compiled once.
    """

    assembly: Assembly
    params: Params
    tokenizer: Tokenizer
    score: Score

    def likelihoods(self, pairs: Sequence[tuple[str, str]]) -> list[Likelihood]:
        """Returns the likelihood of each continuation after its context.

        Args:
          pairs: the texts (context, continuation); a context may be empty.
        """
        return self._score([self.encode_pair(*pair) for pair in pairs])

    def rolling(self, texts: Sequence[str]) -> list[float]:
        """Returns the log probability of each text, in nats; each token follows the longest possible context."""
        num_begin = len(self.tokenizer.begin)
        pairs = [(self._beginning, self.tokenizer.encode(text)[num_begin:]) for text in texts]
        return [one.log_probability for one in self._score(pairs)]

    def generate(self, prompts: Sequence[tuple[str, Mapping[str, Json]]]) -> list[str]:
        """Returns the text generated after each prompt, up to a stop string, an end of document, or the maximum length.

        Args:
          prompts: pairs (text, options). The harness's options are `until` (stop strings), `max_gen_toks`, `do_sample`,
            `temperature`, `top_k` and `top_p`.

        Raises:
          UserError: an unsupported option, or an invalid value.
        """
        same: dict[Wanted, list[int]] = {}
        for index, (_, options) in enumerate(prompts):
            same.setdefault(self._stop_options(options), []).append(index)
        texts = [""] * len(prompts)
        ends = (self.tokenizer.end_id, *self.tokenizer.also_end)
        generator = generating.generator(self.assembly, self.params, ends)
        for wanted, indices in same.items():
            ids = [self._prompt(prompts[index][0], wanted.num_tokens) for index in indices]
            room = fitting(generator.decode, max(map(len, ids)), wanted.num_tokens, within_training=False)
            fits = dataclasses.replace(wanted, num_tokens=room)
            for index, text in zip(indices, answers(generator, self.tokenizer.decode, ids, fits), strict=True):
                texts[index] = text.text
        return texts

    def encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """Returns the token ids of a context and of its continuation, tokenized as one text.

        Blanks at the end of the context move to the continuation, since tokenizers join them with the next word.
        """
        trimmed = context.rstrip()
        continuation = context[len(trimmed) :] + continuation
        before = self.tokenizer.encode(trimmed) if trimmed else list(self.tokenizer.begin)
        joined_tokens = self.tokenizer.encode(trimmed + continuation)
        return before or self._beginning, joined_tokens[len(before) :]

    @property
    def _beginning(self) -> list[int]:
        """The token ids before a text without a context: the tokenizer's `begin` ids, or the end-of-document token."""
        return list(self.tokenizer.begin) or [self.tokenizer.end_id]

    def _score(self, pairs: Sequence[tuple[list[int], list[int]]]) -> list[Likelihood]:
        return likelihoods.likelihoods(self.assembly, self.score, self.params, pairs)

    def _prompt(self, text: str, num_tokens: int) -> list[int]:
        """Returns the token ids of a prompt, shortened at its start to leave space for `num_tokens` new tokens.

        At least half of the model's positions remain for the prompt.
        """
        ids = self.tokenizer.encode(text) or [self.tokenizer.end_id]
        decode = generating.decode_of(self.assembly)
        positions = decode.max_positions or decode.trained_positions
        return ids[-max(positions - num_tokens, positions // 2, 1) :] if positions else ids

    def _stop_options(self, options: Mapping[str, Json]) -> Wanted:
        for name in options:
            if name not in (*_GIVEN, *_LENGTHS):
                raise UserError(unknown("generation_kwargs", name, [*_GIVEN, *_LENGTHS], "leave it out"))
        given = {**_GIVEN, **options}
        lengths = [_number(options, name, 1, MOST) for name in _LENGTHS if name in options]
        until = [given["until"]] if isinstance(given["until"], str) else given["until"] or ()
        if not isinstance(until, list | tuple) or not all(isinstance(stop, str) for stop in until):
            raise UserError(
                Problem("generation_kwargs", got=f"until={until!r}", allowed="a list of texts", nearest="leave it out")
            )
        bounds = {"temperature": (0, MOST), "top_k": (0, MOST), "top_p": (1e-9, 1)}
        temperature, top_k, top_p = (_number(given, name, *ends) for name, ends in bounds.items())
        return Wanted(
            num_tokens=int(lengths[0]) if lengths else MAX_GEN_TOKS,
            sampling=Sampling(temperature, int(top_k), top_p) if given["do_sample"] else Sampling(),
            stops=tuple(stop for stop in until if stop),
            seed=self.assembly.config.seed,
        )


def _number(given: Mapping[str, Json], name: str, least: float, most: float) -> float:
    try:
        value = float(given[name])
    except (TypeError, ValueError):
        value = math.nan
    if not least <= value <= most:
        allowed = f"a number from {least:g} to {most:g}"
        raise UserError(
            Problem("generation_kwargs", got=f"{name}={given[name]!r}", allowed=allowed, nearest="leave it out")
        )
    return value


def open_requests(workdir: str | Path, *words: str, step: int | None = None) -> Requests:
    """Loads a run's weights, to answer requests of the harness.

    Args:
      workdir: the run's folder.
      words: overrides of the run's configuration as on a command line, such as `--config.mesh.tensor=4`.
      step: the step of the checkpoint; None: the newest checkpoint.

    Raises:
      UserError: there is no such run or checkpoint, or the run is not a text model.
    """
    arguments = flags.arguments([f"--workdir={workdir}", *words])
    config = configuration(arguments, [], reads_data=False)
    assembly = assemble_run(config, arguments.workdir, step, folds_pipeline=True)
    problems = likelihoods.problems_of_task(assembly)
    tokenizer = text_of(config, assembly.task)
    if tokenizer.end_id < 0:
        problems.append(
            Problem(
                "data.source",
                got=f"{config.data.source}, whose ids are not text",
                condition="for the harness",
                allowed="data with a tokenizer that ends documents",
                nearest="data.source=text",
            )
        )
    refuse(problems)
    params, _ = restore_weights(assembly, arguments.workdir, step)
    return Requests(assembly, params, tokenizer, likelihoods.scorer(assembly))
