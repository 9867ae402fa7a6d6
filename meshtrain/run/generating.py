"""Generates text with a run's weights: checks the task, removes the pipeline from the mesh, makes the generator.

Generation computes one token of each row at a time, so there are no microbatches for pipeline stages.
"""

import dataclasses
import hashlib
import math
from collections.abc import Callable, Mapping, Sequence

import jax

from meshtrain.assembly.assemble import Assembly, assemble
from meshtrain.assembly.facts import kept_params
from meshtrain.config.mesh_checks import check
from meshtrain.config.schema import Config
from meshtrain.config.tasks import MakeTask
from meshtrain.data.chat_template import open_template
from meshtrain.data.dataset import Dataset
from meshtrain.data.encoding.special_tokens import unmark
from meshtrain.errors import Problem, Problems, UserError, divisors, refuse
from meshtrain.generation.answers import Wanted, answers, fitting
from meshtrain.generation.prompts import encode_prompts, from_file, in_chat
from meshtrain.generation.sampling import Sampling
from meshtrain.generation.token_loop import Generator
from meshtrain.generation.window import by_window
from meshtrain.hardware.compiler_options import CompilerOptions
from meshtrain.launch import peers
from meshtrain.models.task import Decode, Params, token_batch
from meshtrain.sharding.param_sharding import num_parts, rules_of_level
from meshtrain.sharding.rules import PIPELINE, Rules, default_rules, partitioned_axes, sizes_text
from meshtrain.step.shardings import shardings


def problems_of_task(assembly: Assembly) -> list[Problem]:
    """Returns a problem if the task cannot generate text, else [].

    A task with `Task.decode` can generate text. Another task needs `Task.logits`, and its batch must have the entry
    `tokens` and no entry that `token_batch` lacks.
    """
    if assembly.task.decode is not None:
        return []
    if assembly.steps.logits is None:
        return [
            Problem(
                "task",
                got="a task without logits",
                condition="for generate",
                allowed="Task.logits, (params, batch) -> float32  [B, T, vocabulary]",
                nearest="Task(init, loss, batch, logits)",
            )
        ]
    filled = token_batch(1, 1)
    strange = [name for name in assembly.batch if name not in filled]
    if strange or "tokens" not in assembly.batch:
        return [
            Problem(
                "task",
                got=f"a batch of {', '.join(assembly.batch)}",
                condition="for generate",
                allowed=f"'tokens', and optionally {', '.join(name for name in filled if name != 'tokens')}",
                nearest="token_batch(B, T)",
            )
        ]
    return []


def decode_of(assembly: Assembly) -> Decode:
    """Returns the functions that generate tokens with a task for which `problems_of_task` returns [].

    They are `Task.decode`, or, without it, functions that compute `Task.logits` of a full sequence for each new token.
    """
    if assembly.task.decode is not None:
        return assembly.task.decode
    assert assembly.steps.logits is not None
    return by_window(assembly.steps.logits, assembly.batch)


def generator(
    assembly: Assembly, params: Params | None, end_ids: Sequence[int], compiler_options: CompilerOptions | None = None
) -> Generator:
    """Returns a text generator with these weights.

    Args:
      assembly: an assembly without a pipeline, for whose task `problems_of_task` returns [].
      params: the weights, with the shapes and shardings of `assembly.state.params`; None: `Generator.load` sets them
        later.
      end_ids: the token ids that end a text; the value -1 means that no token does.
      compiler_options: XLA's options by name; None: the defaults.
    """
    return Generator(decode_of(assembly), params, assembly.mesh, assembly.placed.rules, end_ids, compiler_options)


def fold_pipeline(
    assembly: Assembly, make_task: MakeTask | None = None, rules: Rules | None = None
) -> tuple[Assembly, Callable[[Params], Params], str]:
    """Returns an assembly without a pipeline on the same devices, a function that moves weights to it, and a message.

    Args:
      assembly: the run's assembly; its weights have the shapes and shardings of `assembly.state.params`.
      make_task: the caller's task function; None: the function that `config.task` names.
      rules: the caller's rules, logical axis -> mesh axes; None: the built-in table.

    Returns:
      The same assembly, the identity and an empty message if there is no pipeline.

    Raises:
      UserError: the model fits no mesh on which tensor and fsdp replace the pipeline axis.
    """
    config, shape, line = without_pipeline(assembly.config, assembly.mesh.shape, make_task, rules)
    if not line:
        return assembly, lambda params: params, line
    other = assemble(config, shape, list(assembly.mesh.devices.flat), make_task, rules)
    there = shardings(other.state.params)
    return other, lambda params: jax.device_put(kept_params(assembly, params), there), line


def sample_texts(
    assembly: Assembly, corpus: Dataset, make_task: MakeTask | None = None, rules: Rules | None = None
) -> Callable[[Params], list[tuple[str, str]]]:
    """Returns a function: weights -> pairs (prompt of `eval_prompts`, greedy continuation); its first call compiles.

    Prompts with messages are formatted by the chat template. Without `eval_prompts` the function returns no pairs.

    Args:
      assembly: the run's assembly.
      corpus: the run's data, whose tokenizer encodes the prompts.
      make_task: the caller's task function; None: the function that `config.task` names.
      rules: the caller's rules, logical axis -> mesh axes; None: the built-in table.

    Raises:
      UserError: a line for each wrong prompt; or the task cannot generate text, or the data have no text.
    """
    config, text, problems = assembly.config, corpus.text, Problems()
    if not config.eval_prompts:
        return lambda params: []
    if text is None:
        raise UserError(
            Problem("eval_prompts", got="a file with data without text", allowed="''", nearest="leave it out")
        )
    given = from_file(config.eval_prompts, problems, chat=True, key="eval_prompts")
    refuse([*problems_of_task(assembly), *problems.lines()])
    if any(prompt.messages for prompt in given):
        template = open_template(config.data.tokenizer, config.data.chat_template)
        given = [in_chat([one], template, text.special)[0] if one.messages else one for one in given]
    ids = encode_prompts(given, text, assembly.task.vocab_size, decode_of(assembly))
    of_prompts = hashlib.sha256(repr([list(map(int, one)) for one in ids]).encode()).hexdigest()
    peers.refuse_differences("eval_prompts", {"hash of the tokens": of_prompts}, peers.SAME_FILES)
    other, move, _ = fold_pipeline(assembly, make_task, rules)
    length = fitting(decode_of(other), max(map(len, ids)), config.eval_tokens, within_training=False)
    draws = generator(other, None, [text.end_id, *text.also_end])

    def drawn(params: Params) -> list[tuple[str, str]]:
        draws.load(move(params))
        texts = answers(draws, text.decode, ids, Wanted(length, Sampling(0.0)))
        draws.load(None)
        return [(unmark(prompt.text), one.text) for prompt, one in zip(given, texts, strict=True)]

    return drawn


def without_pipeline(
    config: Config, shape: Mapping[str, int], make_task: MakeTask | None = None, rules: Rules | None = None
) -> tuple[Config, dict[str, int], str]:
    """Folds the pipeline axis into tensor, fsdp or both; returns the new configuration, axis sizes and a message.

    Tensor is preferred: for each token, tensor sends activations, but fsdp sends all weights. The batch size becomes
    the number of batch shards, because the new axes may not divide the run's batch.

    Args:
      config: the run's configuration.
      shape: the size of each mesh axis of the run.
      make_task: the caller's task function; None: the function that `config.task` names.
      rules: the caller's rules, logical axis -> mesh axes; None: the built-in table.

    Returns:
      The configuration, the axis sizes, and a line that describes the change, which is empty if there is no pipeline.

    Raises:
      UserError: the model fits no mesh on which tensor and fsdp replace the pipeline axis.
    """
    size = shape[PIPELINE]
    if size == 1:
        return config, dict(shape), ""
    table = rules_of_level(rules or default_rules(config.layout), config.zero.effective_level)
    outer, *_, inner = partitioned_axes()
    problems: list[Problem] = []
    for factor in reversed(divisors(size)):
        folded = {**shape, PIPELINE: 1, inner: shape[inner] * factor, outer: shape[outer] * (size // factor)}
        changed = dataclasses.replace(
            config,
            mesh=dataclasses.replace(config.mesh, **folded),
            batch_size=num_parts(table.activations["batch"], folded),
            accumulation_steps=1,
        )
        found = check(changed, folded, make_task, rules)
        if not found:
            return changed, folded, _line(shape, folded)
        problems = problems or found
    nearest = " ".join(f"--config.mesh.{axis}=1" for axis in shape if shape[axis] > 1)
    allowed = f"a size that {inner} or {outer} can replace to generate text on the same {math.prod(shape.values())}"
    allowed += f" devices ({problems[0].key}: {problems[0].fault})"
    raise UserError(Problem("mesh.pipeline", got=size, allowed=allowed, nearest=nearest))


def _line(before: Mapping[str, int], after: Mapping[str, int]) -> str:
    grown = " and ".join(axis for axis in after if after[axis] > before[axis])
    return f"the pipeline of {before[PIPELINE]} is folded into {grown}: {sizes_text(after)}, on the same devices"
