"""Generates text with a run's weights, on any mesh: continues prompts (decoder) or answers them (encoder-decoder).

python -m meshtrain generate --workdir=runs/tiny --prompt="def " --temperature=0
"""

import argparse
import functools
import json
import os
import sys
from collections.abc import Sequence

from meshtrain.cli import flags, output_files
from meshtrain.config.schema import MAX_TEXT_TOKENS
from meshtrain.data.chat_template import open_template
from meshtrain.data.encoding.tokenizer_folder import end_ids
from meshtrain.data.tokenizer import Tokenizer
from meshtrain.errors import Problem, Problems, UserError, refuse, run, warn
from meshtrain.files import expand_user, identities, is_utf8, target_problems
from meshtrain.generation.answers import Shown, Wanted, answers, fitting, num_trained_left, room_left
from meshtrain.generation.prompts import Prompt, encode_prompts, from_file, from_flags, in_chat
from meshtrain.generation.sampling import Sampling
from meshtrain.launch import peers
from meshtrain.launch.early_errors import tell_before_meeting
from meshtrain.models.task import Decode
from meshtrain.run.dataset import text_of
from meshtrain.run.existing_run import add_weights_flag, assemble_run, choice_problems, configuration, restore_weights
from meshtrain.run.generating import decode_of, generator, problems_of_task

MAX_TEMPERATURE = 1_000_000  # all tokens are practically equally probable
MAX_SAMPLES, MAX_SEED, MAX_STEP = 100_000, 2**32 - 1, 10**12
_SHOWN = 60  # characters of a prompt in a title
DEFAULT_PROMPT, DEFAULT_TOKENS, DEFAULT_TEMPERATURE = "def ", 200, 0.8


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m meshtrain generate", description="Continues prompts with a run's weights.", add_help=False
    )
    parser.add_argument("--prompt", action="append", help="the text to continue; may be given several times")
    parser.add_argument("--prompts", metavar="FILE", help='a .jsonl file instead: {"prompt": "..."} on each line')
    parser.add_argument(
        "--chat",
        action="store_true",
        help="each prompt is a message, formatted by the tokenizer's chat template; lines may have messages instead",
    )
    parser.add_argument(
        "--num-tokens", type=int, help=f"maximum tokens of a text (default: {DEFAULT_TOKENS}, or the number that fits)"
    )
    parser.add_argument(
        "--temperature",
        type=float,
        help=f"0: always the most probable token (default: {DEFAULT_TEMPERATURE}; 0 for answers to prompts)",
    )
    parser.add_argument("--top-k", type=int, default=0, help="sample from this many most probable tokens; 0: all")
    parser.add_argument(
        "--top-p",
        type=float,
        default=1.0,
        help="sample from the most probable tokens up to this total probability; 1: all",
    )
    parser.add_argument(
        "--stop", action="append", default=[], help="a text ends before this string; may be given several times"
    )
    parser.add_argument("--num-samples", type=int, default=1, help="texts for each prompt")
    parser.add_argument("--seed", type=int, help="seed of the random numbers (default: the run's seed)")
    parser.add_argument("--step", type=int, help="step of the checkpoint (default: the newest)")
    parser.add_argument("--out", metavar="FILE", help="writes the texts to a .jsonl file instead of printing them")
    add_weights_flag(parser)
    return parser


def _number_problems(arguments: argparse.Namespace) -> list[Problem]:
    """Returns an error line for each flag whose number is outside its bounds."""
    bounds = (
        ("--num-tokens", arguments.num_tokens, 1, MAX_TEXT_TOKENS),
        ("--temperature", arguments.temperature, 0, MAX_TEMPERATURE),
        ("--top-k", arguments.top_k, 0, MAX_TEXT_TOKENS),
        ("--num-samples", arguments.num_samples, 1, MAX_SAMPLES),
        ("--seed", arguments.seed, 0, MAX_SEED),
        ("--step", arguments.step, 0, MAX_STEP),
    )
    problems = []
    for flag, value, least, most in bounds:
        if value is not None and not least <= value <= most:
            fix = most if value > most else least
            problems.append(Problem(flag, got=value, allowed=f"{least} to {most:,}", nearest=fix))
    if not 0 < arguments.top_p <= 1:
        problems.append(Problem("--top-p", got=arguments.top_p, allowed="above 0, at most 1", nearest=1))
    return problems


def _prompts(arguments: argparse.Namespace) -> tuple[list[Prompt], list[Problem]]:
    """Returns the user's prompts, and an error line for each problem of --prompt, --prompts, --stop and --out."""
    problems = Problems()
    for stop in arguments.stop:
        if not stop or not is_utf8(stop):
            problems.add(
                Problem("--stop", got=f"'{stop}'", allowed="a text in UTF-8, not empty", nearest="leave it out")
            )
    if arguments.out is not None:
        problems.add(*target_problems("--out", arguments.out, "texts.jsonl"))
    if arguments.prompt is not None and arguments.prompts is not None:
        problems.add(Problem("--prompt, --prompts", got="both", allowed="one of them", nearest="drop --prompt"))
    prompts = from_flags(arguments.prompt or [], problems)
    if arguments.prompts and arguments.out and identities(expand_user(arguments.prompts)) & identities(arguments.out):
        problems.add(
            Problem(
                "--out",
                got=f"'{arguments.out}', which is also the file of --prompts",
                allowed="another file",
                nearest=f"--out={arguments.out}.texts.jsonl",
            )
        )
    if arguments.prompts is not None:
        prompts += from_file(arguments.prompts, problems, chat=arguments.chat)
    return prompts, problems.lines()


def _num_tokens(asked: int | None, decode: Decode, longest: int) -> int:
    """Returns the number of tokens to generate for each prompt.

    Warns if the texts will be longer than the sequences of training.

    Args:
      asked: the value of --num-tokens; None: the default, reduced to the number that fits.
      decode: the functions that generate tokens, with the model's limits.
      longest: the number of tokens in the longest prompt.

    Raises:
      UserError: `asked` tokens do not fit after the longest prompt.
    """
    room, trained = room_left(decode, longest), num_trained_left(decode, longest)
    if asked is not None and 0 <= room < asked:
        raise UserError(
            Problem(
                "--num-tokens",
                got=asked,
                allowed=(
                    f"at most {room}, because the model has {decode.max_positions} "
                    f"positions{f' and the longest prompt {longest} tokens' if decode.continues else ''}"
                ),
                nearest=room,
            )
        )
    wanted = fitting(decode, longest, DEFAULT_TOKENS, within_training=True) if asked is None else asked
    if 0 <= trained < wanted and peers.is_main_process():
        what = f"{longest} tokens of a prompt and {wanted} more" if decode.continues else f"{wanted} tokens"
        warn(f"{what} exceed the {decode.trained_positions} positions of training; the end of the text may be poor")
    return wanted


def _heads(prompts: Sequence[Prompt], num_samples: int, *, continues: bool) -> list[str]:
    """Returns the text to print before each generated text, for all samples of the first prompt, then of the next.

    The text starts with a title if there are several generated texts.

    Args:
      prompts: the prompts.
      num_samples: the number of generated texts for each prompt.
      continues: whether generated texts continue their prompts. If so, the complete prompt follows the title; if not,
        the title contains the start of the prompt.
    """
    heads = []
    for index, prompt in enumerate(prompts, start=1):
        line = " ".join(prompt.text.split())
        asked = "" if continues else f": {line if len(line) <= _SHOWN else f'{line[:_SHOWN]}...'}"
        for sample in range(1, num_samples + 1):
            title = f"prompt {index} of {len(prompts)}, sample {sample} of {num_samples}{asked}"
            several = len(prompts) * num_samples > 1
            heads.append((f"--- {title}\n" if several else "") + (prompt.text if continues else ""))
    return heads


def main(argv: Sequence[str]) -> int:
    """Prints texts generated with a run's weights, or writes them to a file; returns the exit code.

    Raises:
      UserError: a wrong flag, prompt, configuration, checkpoint or task.
    """
    tell_before_meeting(os.environ)
    arguments = flags.arguments(argv, _parser())
    prompts, problems = _prompts(arguments)
    of_weights = choice_problems(arguments.weights, arguments.workdir)
    config = configuration(arguments, [*_number_problems(arguments), *of_weights, *problems], reads_data=False)
    assembly = assemble_run(config, arguments.workdir, arguments.step, folds_pipeline=True)
    refuse(problems_of_task(assembly))
    decode = decode_of(assembly)
    continues = decode.continues and not arguments.chat  # an answer is printed without its prompt
    if arguments.chat and not decode.continues:
        raise UserError(
            Problem(
                "--chat",
                got="a task whose texts answer prompts",
                allowed="a task that continues prompts",
                nearest="leave it out",
            )
        )
    if not prompts and not continues:
        raise UserError(Problem("--prompt", got="none", allowed="at least one here", nearest="--prompt=TEXT"))
    prompts = prompts or [Prompt(DEFAULT_PROMPT, "--prompt")]
    tokenizer: Tokenizer = text_of(config, assembly.task)
    asked = prompts
    if arguments.chat:
        asked = in_chat(prompts, open_template(config.data.tokenizer, config.data.chat_template), tokenizer.special)
    ids = encode_prompts(asked, tokenizer, assembly.task.vocab_size, decode)
    num_tokens = _num_tokens(arguments.num_tokens, decode, max(len(one) for one in ids))
    params, _ = restore_weights(assembly, arguments.workdir, arguments.step, arguments.weights)
    default_temperature = DEFAULT_TEMPERATURE if continues else 0.0
    temperature = default_temperature if arguments.temperature is None else arguments.temperature
    sampling = Sampling(temperature, arguments.top_k, arguments.top_p)
    seed = config.seed if arguments.seed is None else arguments.seed
    wanted = Wanted(num_tokens, sampling, arguments.stop, arguments.num_samples, seed)
    ends = (tokenizer.end_id, *tokenizer.also_end, *end_ids(str(arguments.workdir)))
    draw = functools.partial(answers, generator(assembly, params, ends), tokenizer.decode, ids, wanted)
    if not peers.is_main_process():
        draw()
    elif arguments.out is None:
        heads = _heads(prompts, arguments.num_samples, continues=continues)
        draw(Shown(functools.partial(print, end="", flush=True), heads))
    else:
        lines = []
        for number, text in enumerate(draw()):
            index, sample = divmod(number, arguments.num_samples)
            fields = {"prompt": prompts[index].text, "index": index, "sample": sample}
            fields |= {"text": text.text, "ended": text.ended}
            lines.append(json.dumps(fields, ensure_ascii=False) + "\n")
        output_files.write("--out", arguments.out, "".join(lines))
        print(f"{len(lines)} texts in {arguments.out}")
    return 0


if __name__ == "__main__":
    run(lambda: main(sys.argv[1:]))
