"""What a run says when it is done."""

import functools
import math
from collections.abc import Mapping
from pathlib import Path

from meshtrain.assemble import Assembly
from meshtrain.data.baseline import bigram_loss
from meshtrain.data.corpus import Corpus
from meshtrain.generate import continued
from meshtrain.run import workdir
from meshtrain.run.evaluate import evaluated_examples
from meshtrain.step.state import TrainState

PROMPT, NUM_SAMPLE_TOKENS, TEMPERATURE = "def ", 160, 0.7


def show(
    assembly: Assembly,
    corpus: Corpus,
    state: TrainState,
    values: Mapping[str, float | None],
    run: Path,
    *,
    is_main: bool,
) -> None:
    """Prints the summary: losses beside the bigram's, tokens, speed, where things lie, and a sample of text.

    Every process calls it, for the sample is drawn by all of them together.

    Args:
      assembly: what was trained.
      corpus: what it learned from.
      state: the last one.
      values: what was last logged and evaluated.
      run: its folder.
      is_main: whether this process is the one that prints and writes (process 0).
    """
    config = assembly.config
    lines = ["", f"done: step {int(state.step)}"]
    if (loss := values.get("eval_loss")) is not None:
        lines.append(f"validation loss   {loss:.4f} nats a token (perplexity {math.exp(min(loss, 50.0)):.2f})")
        scored = evaluated_examples(config, corpus)
        compute = functools.partial(bigram_loss, corpus.train, corpus.validation, indices=scored)
        bigram = workdir.kept(run, f"bigram_loss_on_{len(scored)}", compute, writes=is_main)
        if bigram is not None:
            verdict = "better" if loss < bigram else "not better"
            lines.append(f"bigram model      {bigram:.4f} on the same text: the run is {verdict}")
    unit = assembly.task.unit
    lines.append(f"{unit:<17} {int(state.step) * assembly.task.num_units:,}")
    if rate := values.get(f"{unit}_per_second"):
        lines.append(f"{f'{unit} a second':<17} {rate:,.0f}")
    places = "config.json, layout.txt, metrics.jsonl, tensorboard/, checkpoints/"
    here = Path.cwd()
    shown = run.relative_to(here) if run.is_relative_to(here) else run
    lines.append(f"in                {shown}: {places}")
    if assembly.logits is not None and corpus.speaks:
        sampled = continued(assembly, corpus, state.params, PROMPT, NUM_SAMPLE_TOKENS, TEMPERATURE, config.seed)
        lines += ["a sample", *(f"  | {line}" for line in sampled.splitlines())]
    if is_main:
        print("\n".join(lines), flush=True)
