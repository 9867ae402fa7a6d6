"""Weights and a prompt -> text, on any mesh.

B: sequences in the batch, all copies of the prompt, one for each shard of the batch on the mesh; T: tokens a sequence.
"""

import argparse
import dataclasses
import sys
from collections.abc import Collection, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from meshtrain.assemble import Assembly, assemble, stored_params
from meshtrain.config.config import check
from meshtrain.config.of_run import configuration
from meshtrain.data.corpus import Corpus, tokenizer_for
from meshtrain.data.tokenize import Tokenizer
from meshtrain.launch import distributed, peers
from meshtrain.layout.mesh import mesh_shape, num_needed
from meshtrain.layout.partition import num_parts
from meshtrain.models.task import Batch, Params, token_batch
from meshtrain.store.other_runs import find, restore_params
from meshtrain.words import flags
from meshtrain.words.errors import UserError, run
from meshtrain.words.paths import is_utf8

MAX_TEMPERATURE = 1e6  # at which all tokens are equally probable
MAX_TOKENS = 1_000_000


def sample(
    assembly: Assembly, params: Params, prompt: Sequence[int], num_tokens: int, temperature: float, seed: int
) -> list[int]:
    """Returns token ids that follow a prompt.

    Each token takes one forward pass over the last T tokens. One compiled loop draws all tokens.

    Args:
      assembly: of a task with logits.
      params: with the shapes and shardings of `assembly.state.params`.
      prompt: at least one token id; only the last T - 1 are read (the last one if T is 1).
      num_tokens: how many to draw.
      temperature: 0 takes the most probable token each time.
      seed: of the random numbers.
    """
    logits = assembly.logits
    assert logits is not None
    rows = num_parts(assembly.rules.activations["batch"], assembly.mesh.shape)
    length = assembly.batch["tokens"].shape[1]
    recent = list(prompt)[-max(length - 1, 1) :]
    window = np.zeros((rows, length), np.int32)
    window[:, : len(recent)] = recent

    def draw(params: Params, window: jax.Array, filled: int, key: jax.Array) -> jax.Array:
        def one(carry: tuple[jax.Array, jax.Array], key: jax.Array) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
            window, filled = carry
            here = jnp.take(logits(params, _batch(window, assembly.batch)), filled - 1, axis=1)[0]
            token = jnp.argmax(here)
            if temperature > 0:
                token = jax.random.categorical(key, here / temperature)
            is_full = filled == length
            window = jnp.where(is_full, jnp.roll(window, -1, axis=1), window)
            filled = jnp.where(is_full, length - 1, filled)
            window = jax.lax.dynamic_update_slice(window, jnp.full((rows, 1), token, jnp.int32), (0, filled))
            return (window, filled + 1), token

        _, tokens = jax.lax.scan(one, (window, jnp.int32(filled)), jax.random.split(key, num_tokens))
        return tokens

    whole = NamedSharding(assembly.mesh, PartitionSpec())  # so that each process can read it
    tokens = jax.jit(draw, out_shardings=whole)(params, window, len(recent), jax.random.key(seed))
    return [int(token) for token in np.asarray(tokens)]


def problems_of_task(assembly: Assembly) -> list[str]:
    """Returns one line if a task cannot generate text: it has no logits, or its batch has entries other than text's."""
    if assembly.logits is None:
        return ["task: got one without logits; allowed for generate: Task.logits, (params, batch) -> float32 [B, T, "
                "vocabulary]; nearest: Task(init, loss, batch, logits)"]  # fmt: skip
    filled = token_batch(1, 1)
    strange = [name for name in assembly.batch if name not in filled]
    if strange or "tokens" not in assembly.batch:
        return [
            f"task: got a batch of {', '.join(assembly.batch)}; allowed for generate: 'tokens', and of the others "
            f"{', '.join(filled)}; nearest: token_batch(B, T)"
        ]
    return []


def _batch(window: jax.Array, wanted: Collection[str]) -> Batch:
    """Returns the entries `wanted` of a batch whose tokens are `window` [B, T], one document in each row."""
    ones = jnp.ones(window.shape, jnp.int32)
    positions = jnp.broadcast_to(jnp.arange(window.shape[1]), window.shape)
    every = {
        "tokens": window,
        "targets": window,
        "segment_ids": ones,
        "positions": positions,
        "weights": ones.astype(jnp.float32),
    }
    return {name: every[name] for name in wanted}


def continued(
    assembly: Assembly,
    text: Corpus | Tokenizer,
    params: Params,
    prompt: str,
    num_tokens: int,
    temperature: float,
    seed: int,
) -> str:
    """Returns the prompt and the text that follows it; `text` encodes and decodes, `sample` describes the rest."""
    ids = text.encode(prompt)
    return prompt + text.decode(sample(assembly, params, ids, num_tokens, temperature, seed))


def main(argv: Sequence[str]) -> int:
    """Prints a prompt continued by the newest checkpoint of a workdir; returns the exit code.

    Raises:
      UserError: a wrong flag, configuration, checkpoint or task.
    """
    extra = argparse.ArgumentParser(
        prog="python -m meshtrain generate", description="A run's newest weights continue a prompt.", add_help=False
    )
    extra.add_argument("--prompt", default="def ", help="the text to continue")
    extra.add_argument("--num-tokens", type=int, default=200, help="tokens to draw")
    extra.add_argument("--temperature", type=float, default=0.8, help="0 takes the most probable token each time")
    arguments = flags.arguments(argv, extra)
    problems = []
    if arguments.num_tokens < 1:
        problems.append(f"--num-tokens: got {arguments.num_tokens}; allowed: at least 1; nearest: 1")
    if not 0 <= arguments.temperature <= MAX_TEMPERATURE:
        near = MAX_TEMPERATURE if arguments.temperature > MAX_TEMPERATURE else 0
        problems.append(
            f"--temperature: got {arguments.temperature}; allowed: 0 to {MAX_TEMPERATURE:g}; nearest: {near:g}"
        )
    if arguments.num_tokens > MAX_TOKENS:
        problems.append(f"--num-tokens: got {arguments.num_tokens}; allowed: at most {MAX_TOKENS}; nearest: that")
    if not arguments.prompt or not is_utf8(arguments.prompt):
        problems.append(f"--prompt: got '{arguments.prompt}'; allowed: a text in UTF-8, not empty; nearest: 'def '")
    config = configuration(arguments, problems, reads_data=False)
    devices, _ = distributed.start(num_needed(config.mesh), is_open=-1 in dataclasses.astuple(config.mesh))
    shape = mesh_shape(config.mesh, len(devices), simulated=devices[0].platform == "cpu")
    if problems := check(config, shape):
        raise UserError(*problems)
    find(arguments.workdir).close()  # before anything is compiled
    assembly = assemble(config, shape, devices)
    if problems := problems_of_task(assembly):
        raise UserError(*problems)
    tokenizer = tokenizer_for(config.data, vocab_size=assembly.task.vocab_size)
    params = stored_params(assembly, restore_params(arguments.workdir, assembly.kept_state.params))
    wanted = arguments.prompt, arguments.num_tokens, arguments.temperature
    answer = continued(assembly, tokenizer, params, *wanted, config.seed)
    if peers.is_main_process():
        print(answer)
    return 0


if __name__ == "__main__":
    run(lambda: main(sys.argv[1:]))
