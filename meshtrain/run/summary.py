"""Prints the summary at the end of a run: losses, speed, files, and sampled text."""

import functools
import math
from collections.abc import Mapping
from pathlib import Path

from meshtrain.assembly.assemble import Assembly
from meshtrain.config.schema import Config
from meshtrain.config.tasks import MakeTask
from meshtrain.data.corpus import Corpus, bigram_loss
from meshtrain.data.dataset import Dataset
from meshtrain.data.encoding.special_tokens import unmark
from meshtrain.errors import UserError, warn
from meshtrain.files import write_whole
from meshtrain.generation.answers import Wanted, answers, fitting
from meshtrain.generation.sampling import Sampling
from meshtrain.launch import peers
from meshtrain.models.task import Params
from meshtrain.observe.run_files import EPOCHS, EVALUATED, PROMPTED_FILE, SAMPLES_FILE
from meshtrain.run import workdir
from meshtrain.run.dataset import examples_consumed
from meshtrain.run.evaluation import first_validation
from meshtrain.run.generating import decode_of, fold_pipeline, generator, problems_of_task
from meshtrain.run.session import Session
from meshtrain.sharding.rules import Rules
from meshtrain.step.state import TrainState

_PLACES = (
    "config.json", "layout.txt", "metrics.jsonl", PROMPTED_FILE, "tensorboard", "profile", "checkpoints", "damaged",
)  # fmt: skip


def show(
    session: Session,
    state: TrainState,
    values: Mapping[str, float | None],
    make_task: MakeTask | None = None,
    rules: Rules | None = None,
) -> None:
    """Prints the summary: losses, the bigram model's loss, tokens, speed, the run's files, and a sample of text.

    All processes call it, because they compute the sample together; process 0 prints.

    Args:
      session: the objects of the run.
      state: the training state after the last step.
      values: metric name -> value in the last logged row and the last evaluation.
      make_task: the caller's task function; None: the function that `config.task` names.
      rules: the caller's rules, logical axis -> mesh axes; None: the built-in table.
    """
    assembly, corpus, run = session.assembly, session.corpus, session.run
    lines = ["", f"done: step {int(state.step)}"]
    if (loss := values.get("eval_loss")) is not None:
        units_text = (
            f" nats a token (perplexity {math.exp(min(loss, 50.0)):.2f})" if assembly.task.unit == "tokens" else ""
        )
        lines.append(f"validation loss   {loss:.4f}{units_text}")
        bigram = bigram_of(assembly.config, corpus, run) if isinstance(corpus, Corpus) else None
        if bigram is not None:
            verdict = "better" if loss < bigram else "not better"
            lines.append(f"bigram model      {bigram:.4f} on the same text: the run is {verdict}")
    lines += [f"validation {name:<6} {value:.4f}" for name, value in metrics_of_evaluation(values).items()]
    unit = assembly.task.unit
    lines.append(f"{unit:<17} {int(state.step) * assembly.task.num_units:,}")
    of_sources = examples_consumed(assembly.config, assembly.task, corpus, int(state.step))
    for name in (name.removeprefix(EPOCHS) for name in of_sources if name.startswith(EPOCHS)):
        lines.append(f"{name:<17} {of_sources[f'{unit}/{name}']:,} {unit}, {of_sources[EPOCHS + name]:.2f} epochs")
    if rate := rate_of_the_run(values, assembly.task.num_units):
        lines.append(f"{f'{unit} a second':<17} {rate:,.0f}")
    here = Path.cwd()
    shown = run.relative_to(here) if run.is_relative_to(here) else run
    lines.append(f"in                {shown}: {', '.join(places(run))}")
    if sampled := sample(assembly, corpus, state.params, make_task, rules):
        lines += ["a sample", *(f"  | {line}" for line in sampled.splitlines())]
    if not peers.is_main_process():
        return
    if sampled:
        try:
            write_whole(run / SAMPLES_FILE, sampled)
        except OSError as error:
            warn(f"{run / SAMPLES_FILE}: {error}; the sample is only printed here")
    print("\n".join(lines), flush=True)


def metrics_of_evaluation(values: Mapping[str, float | None]) -> dict[str, float]:
    """Returns the metrics of the last evaluation except the loss: name, such as `accuracy` -> value.

    Args:
      values: metric name -> value in the last logged row and the last evaluation. Names of an evaluation's metrics
        have the prefix `eval_`, which the result's names lack. A metric with the value None is left out.
    """
    evaluated = {name.removeprefix(EVALUATED): value for name, value in values.items() if name.startswith(EVALUATED)}
    return {name: value for name, value in evaluated.items() if name != "loss" and value is not None}


def bigram_of(config: Config, corpus: Corpus, run: Path) -> float | None:
    """Returns the loss of a bigram model, in nats a token, on the validation examples that the run's evaluations use.

    It is None for data with more than 512 token ids or without targets. It is computed once and stored in corpus.json.

    Args:
      config: the configuration, whose `num_eval_batches` limits the examples.
      corpus: the training text, to which the bigram model is fitted, and the validation text.
      run: the run's folder.
    """
    indices = first_validation(config, corpus.validation)
    compute = functools.partial(bigram_loss, corpus.train, corpus.validation, indices=indices)
    result: float | None = workdir.remember(run, f"bigram_loss_on_{len(indices)}", compute)
    return result


def rate_of_the_run(values: Mapping[str, float | None], units_per_step: int) -> float | None:
    """Returns the mean throughput of a run, restarts included, in units a second; None if no step was timed.

    Args:
      values: the last logged metrics, with `timed_steps` and the `useful_seconds` of these steps.
      units_per_step: the number of tokens (or of the task's unit) in a global batch.
    """
    num_steps, seconds = values.get("timed_steps"), values.get("useful_seconds")
    return num_steps * units_per_step / seconds if num_steps and seconds else None


def places(run: Path) -> list[str]:
    """Returns the names of a run's existing files and folders, for the summary; a folder's name ends with a slash."""
    return [f"{name}/" if (run / name).is_dir() else name for name in _PLACES if (run / name).exists()]


PROMPTS, TEMPERATURE = ("def ",), 0.7
# With a cache a token takes milliseconds, but for a large model the two functions take long to compile.
NUM_TOKENS, MOST_PARAMETERS = 160, 10_000_000


def sample(
    assembly: Assembly,
    corpus: Dataset,
    params: Params,
    make_task: MakeTask | None = None,
    rules: Rules | None = None,
) -> str:
    """Generates texts after a few prompts; returns the prompts with the texts, separated by line breaks.

    A text that continues its prompt is sampled at a temperature of 0.7. An answer to a prompt is decoded greedily.

    Args:
      assembly: the run's assembly.
      corpus: the run's data, with the tokenizer and the prompts.
      params: the weights, with the shapes and shardings of `assembly.state.params`.
      make_task: the caller's task function; None: the function that `config.task` names.
      rules: the caller's rules, logical axis -> mesh axes; None: the built-in table.

    Returns:
      The sample; or one line with the error that prevents a sample; or '' if no sample is wanted (`sample_tokens`), the
      data are no text, the task generates no text, or there is no prompt that fits the model.
    """
    text = corpus.text
    most = sample_tokens(assembly.config, assembly.task.num_parameters)
    if text is None or not most or problems_of_task(assembly):
        return ""
    decode = decode_of(assembly)
    prompts = corpus.prompts or (PROMPTS if decode.continues else ())
    try:
        ids = [text.encode_templated(prompt) if corpus.are_templated else text.encode(prompt) for prompt in prompts]
        length = fitting(decode, max(map(len, ids), default=0), most, within_training=assembly.config.sample_tokens < 0)
        if not ids or not length or not all(ids):
            return ""
        assembly, move, line = fold_pipeline(assembly, make_task, rules)
    except UserError as error:  # the run is done and saved, whether it can be sampled or not
        return str(error)
    temperature = TEMPERATURE if decode.continues else 0.0
    wanted = Wanted(length, Sampling(temperature), seed=assembly.config.seed)
    drawn = answers(generator(assembly, move(params), [text.end_id]), text.decode, ids, wanted)
    between = "" if decode.continues else " -> "
    shown = [f"{unmark(prompt)}{between}{one.text}" for prompt, one in zip(prompts, drawn, strict=True)]
    return "\n".join([*([f"({line})"] if line else []), *shown])


def sample_tokens(config: Config, num_parameters: int) -> int:
    """Returns the maximum number of tokens in the final sample; 0: no sample.

    If `config.sample_tokens` is negative, the result is 160, or 0 for a model with more than 10 million parameters.
    """
    if config.sample_tokens >= 0:
        return config.sample_tokens
    return NUM_TOKENS if num_parameters <= MOST_PARAMETERS else 0
