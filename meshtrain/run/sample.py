"""The sample that a run draws at its end."""

from meshtrain.assemble import Assembly
from meshtrain.config.config import Config
from meshtrain.config.tasks import MakeTask
from meshtrain.data.corpus import Corpus
from meshtrain.data.own import Data
from meshtrain.generation.answers import Wanted, answers, fitting
from meshtrain.generation.sampling import Sampling
from meshtrain.layout.rules import Rules
from meshtrain.models.task import Params
from meshtrain.run.generating import TextOfTokens, decode_of, folded, generator, problems_of_task
from meshtrain.words.errors import UserError

PROMPTS, TEMPERATURE = ("def ",), 0.7
# With a cache a token takes milliseconds, but for a large model the two functions take long to compile.
NUM_TOKENS, MOST_PARAMETERS = 160, 10_000_000


def sample(
    assembly: Assembly,
    corpus: Corpus | Data,
    params: Params,
    make_task: MakeTask | None = None,
    rules: Rules | None = None,
) -> str:
    """Returns prompts with the texts that follow them, or one line that says why there is none; `` where none is due.

    A text that continues its prompt is drawn at a temperature of 0.7. An answer to a prompt is the most probable one.

    Args:
      assembly: what was trained.
      corpus: its data. Those without text, or that bring no prompts to a task whose texts answer them, get no sample.
      params: with the shapes and shardings of `assembly.state.params`.
      make_task: the caller's task function, as in `assemble`.
      rules: the caller's rules, as in `assemble`.
    """
    text = text_of_data(corpus)
    most = sample_tokens(assembly.config, assembly.task.num_parameters)
    if text is None or not most or problems_of_task(assembly):
        return ""
    decode = decode_of(assembly)
    prompts = (corpus.prompts if isinstance(corpus, Data) else ()) or (PROMPTS if decode.continues else ())
    try:
        ids = [text.encode(prompt) for prompt in prompts]
        length = fitting(decode, max(map(len, ids), default=0), most, within_training=assembly.config.sample_tokens < 0)
        if not ids or not length or not all(ids):
            return ""
        assembly, params, line = folded(assembly, params, make_task, rules)
    except UserError as error:  # the run is done and saved, whether it can be sampled or not
        return str(error)
    temperature = TEMPERATURE if decode.continues else 0.0
    wanted = Wanted(length, Sampling(temperature), seed=assembly.config.seed)
    drawn = answers(generator(assembly, params, [text.end_id]), text.decode, ids, wanted)
    between = "" if decode.continues else " -> "
    shown = [f"{prompt}{between}{one.text}" for prompt, one in zip(prompts, drawn, strict=True)]
    return "\n".join([*([f"({line})"] if line else []), *shown])


def text_of_data(corpus: Corpus | Data) -> TextOfTokens | None:
    """Returns what encodes and decodes the text of a run's data; None where they are no text."""
    if isinstance(corpus, Corpus):
        return corpus if corpus.has_text else None
    return corpus.text


def sample_tokens(config: Config, num_parameters: int) -> int:
    """Returns how many tokens the sample has at most, 0 for none."""
    if config.sample_tokens >= 0:
        return config.sample_tokens
    return NUM_TOKENS if num_parameters <= MOST_PARAMETERS else 0
