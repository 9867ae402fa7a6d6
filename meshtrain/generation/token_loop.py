"""The decoding loop: prefills prompts, then generates up to 16 tokens in each call of one compiled function.

R: rows of a batch, one per text, padded to a multiple of the batch's shards; P: tokens of a prompt after padding; V:
padded vocabulary.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from meshtrain.generation.sampling import Sampling, choose, row_keys
from meshtrain.hardware.compiler_options import CompilerOptions
from meshtrain.models.task import Cache, Decode, Params
from meshtrain.sharding.param_sharding import activation_sharding, num_parts
from meshtrain.sharding.rules import Rules
from meshtrain.sharding.trees import Shardings

CALL_TOKENS = 16  # tokens of a row in one call, after which the host reads them
MOST_ROWS, MOST_CACHE_BYTES = 64, 2 << 30  # limits of a batch, and of its cache on one device
SHORTEST = 64
NOTHING = -1  # instead of a token in rows that are done

# (index of the request, its next tokens, whether they are its last ones) -> whether the request needs no more tokens.
Take = Callable[[int, list[int], bool], bool]


@dataclasses.dataclass(frozen=True)
class Request:
    """A text to generate.

    Attributes:
      ids: the prompt, at least one token.
      prompt: the prompt's index among all prompts.
      sample: the index among the samples of this prompt. Random numbers depend on it and on `prompt`.
    """

    ids: Sequence[int]
    prompt: int = 0
    sample: int = 0


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class State:
    """The state on the devices between two calls.

    Attributes:
      cache: see `Decode`.
      tokens: int32 [R], the last token of each row.
      keys: uint32 [R, words], the data of each row's key.
      index: int32 scalar, the number of tokens generated so far.
    """

    cache: Cache
    tokens: jax.Array
    keys: jax.Array
    index: jax.Array


# The loop state of `advance`: number of generated tokens, the state, which rows are done, and the tokens of each row.
Carry: TypeAlias = tuple[jax.Array, State, jax.Array, jax.Array]


class Generator:
    """Generates texts with one set of weights on one mesh. Functions are compiled once for each shape and sampling."""

    def __init__(
        self,
        decode: Decode,
        params: Params | None,
        mesh: Mesh,
        rules: Rules,
        end_ids: Sequence[int],
        compiler_options: CompilerOptions | None = None,
    ) -> None:
        """Casts the weights to the dtypes of the computation.

        Args:
          decode: how the task generates tokens.
          params: the weights on `mesh`, with their shardings.
          mesh: the mesh; its pipeline axis has size 1.
          rules: logical axis -> mesh axes, for the cache.
          end_ids: the tokens that end a text; -1: no token does.
          compiler_options: XLA options by name; None: the defaults.
        """
        self.compiler_options = compiler_options
        self.decode = decode
        self.mesh = mesh
        self.rules = rules
        self.end_ids = end_ids
        self.load(params)
        self.compiled = functools.cache(self._compile)

    def load(self, params: Params | None) -> None:
        """Replaces the weights by others with the same shardings; None frees the memory of the current weights."""
        self.params = None if params is None else _cast(self.decode, params)

    def draw(self, requests: Sequence[Request], num_tokens: int, sampling: Sampling, seed: int, take: Take) -> None:
        """Generates tokens for each request until `take` needs no more, the end token comes, or there are `num_tokens`.

        Args:
          requests: the requests, in the order of batching.
          num_tokens: the maximum for each request.
          sampling: how tokens are chosen.
          seed: the seed of the random numbers.
          take: receives the tokens of a request in pieces, without the end token.
        """
        lengths = round_length(max(len(request.ids) for request in requests)), round_length(num_tokens)
        num_rows = self._num_rows(len(requests), *lengths)
        prefill, advance = self.compiled(sampling, num_rows, *lengths)
        key = np.asarray(jax.random.key_data(jax.random.key(seed)))
        for start in range(0, len(requests), num_rows):
            some = requests[start : start + num_rows]
            state, drawn = prefill(self.params, *_rows(some, num_rows, lengths[0]), key)
            index, done = 1, [row >= len(some) for row in range(num_rows)]
            while True:
                for row, tokens in enumerate(np.asarray(drawn)):
                    if not done[row]:
                        done[row] = self._hand_over(take, start + row, tokens, index == num_tokens)
                if all(done):
                    break
                state, drawn = advance(self.params, state, np.asarray(done), num_tokens)
                index = min(index + CALL_TOKENS, num_tokens)

    def _num_rows(self, num_requests: int, prompt_length: int, num_steps: int) -> int:
        """Returns R: the requests rounded up to the batch's shards, limited by the rows and cache bytes of a batch."""
        shards = num_parts(self.rules.activations["batch"], self.mesh.shape)
        num_bytes = 0
        for entry in self.decode.cache(shards, prompt_length, num_steps).values():
            shape = self._sharding(entry.shape, entry.axes).shard_shape(entry.shape)
            num_bytes += math.prod(shape) * jnp.dtype(entry.dtype).itemsize
        most = max(min(MOST_ROWS // shards, MOST_CACHE_BYTES // max(num_bytes, 1)), 1)
        return shards * min(-(-num_requests // shards), most)

    def _hand_over(self, take: Take, request: int, drawn: np.ndarray, is_last: bool) -> bool:
        """Passes a row's new tokens to `take`, and returns whether the row is done."""
        tokens = [int(token) for token in drawn if token != NOTHING]
        if tokens and tokens[-1] in self.end_ids:
            tokens, is_last = tokens[:-1], True
        return take(request, tokens, is_last) or is_last

    def _compile(
        self, sampling: Sampling, num_rows: int, prompt_length: int, num_steps: int
    ) -> tuple[jax.stages.Wrapped, jax.stages.Wrapped]:
        """Returns `prefill` and `advance`, jitted for these shapes, with shardings for all results."""
        decode, end_ids = self.decode, np.asarray(self.end_ids, np.int32)
        entries = decode.cache(num_rows, prompt_length, num_steps)
        row = self._sharding((num_rows,), ("batch",))
        replicated = NamedSharding(self.mesh, PartitionSpec())  # replicated, so that each process can read it
        of_cache = {name: self._sharding(entry.shape, entry.axes) for name, entry in entries.items()}
        of_state: list[Shardings] = [of_cache, row, row, replicated]

        def next_tokens(logits: jax.Array, keys: jax.Array, index: jax.Array) -> jax.Array:
            # Gather the vocabulary on each device, because top-p sorts it.
            logits = jax.lax.with_sharding_constraint(logits, row)
            return choose(logits, jax.random.wrap_key_data(keys), index, sampling)

        def prefill(
            params: Params,
            tokens: jax.Array,
            lengths: jax.Array,
            prompts: jax.Array,
            samples: jax.Array,
            key: jax.Array,
        ) -> tuple[State, jax.Array]:
            """Processes the prompts, int32 [R, P]; returns the state and the first token of each row, int32 [R, 1]."""
            zeros = {name: jnp.zeros(entry.shape, entry.dtype) for name, entry in entries.items()}
            empty = jax.lax.with_sharding_constraint(zeros, of_cache)
            logits, cache = decode.prefill(params, tokens, lengths, empty)
            keys = jax.random.key_data(row_keys(jax.random.wrap_key_data(key), prompts, samples))
            first = next_tokens(logits, keys, jnp.int32(0))
            return State(cache, first, keys, jnp.int32(1)), first[:, None]

        def advance(params: Params, state: State, done: jax.Array, num_tokens: jax.Array) -> tuple[State, jax.Array]:
            """Generates up to 16 more tokens for each row; returns the state and the tokens, int32 [R, 16].

            Tokens are NOTHING after a row is done. The loop ends early if all rows are done or have `num_tokens`.
            `done` is bool [R].
            """

            def goes_on(carry: Carry) -> jax.Array:
                count, state, done, _ = carry
                return (count < CALL_TOKENS) & (state.index < num_tokens) & ~jnp.all(done)

            def one(carry: Carry) -> Carry:
                count, state, done, drawn = carry
                logits, cache = decode.step(params, state.tokens, state.cache)
                tokens = next_tokens(logits, state.keys, state.index)
                drawn = drawn.at[:, count].set(jnp.where(done, NOTHING, tokens))
                ended = jnp.isin(tokens, end_ids)
                return count + 1, State(cache, tokens, state.keys, state.index + 1), done | ended, drawn

            nothing = jnp.full((*done.shape, CALL_TOKENS), NOTHING, jnp.int32)
            _, state, _, drawn = jax.lax.while_loop(goes_on, one, (jnp.int32(0), state, done, nothing))
            return state, drawn

        jit = functools.partial(
            jax.jit, compiler_options=self.compiler_options, out_shardings=(State(*of_state), replicated)
        )
        return jit(prefill), jit(advance, donate_argnums=1)

    def _sharding(self, shape: tuple[int, ...], axes: tuple[str | None, ...]) -> NamedSharding:
        return activation_sharding(shape, axes, self.rules, self.mesh, path="cache")


def round_length(length: int) -> int:
    """Returns the smallest power of two that is at least `length` and 64, so that few shapes are compiled.

    >>> round_length(3), round_length(64), round_length(65), round_length(1000)
    (64, 64, 128, 1024)
    """
    return max(SHORTEST, 1 << (length - 1).bit_length())


def _rows(requests: Sequence[Request], num_rows: int, length: int) -> tuple[np.ndarray, ...]:
    """Returns tokens [R, P], lengths, prompts and samples [R], all int32; the last request pads the batch."""
    filled = [*requests, *[requests[-1]] * (num_rows - len(requests))]
    tokens = np.zeros((num_rows, length), np.int32)
    for row, request in enumerate(filled):
        tokens[row, : len(request.ids)] = request.ids
    columns = zip(*[(len(request.ids), request.prompt, request.sample) for request in filled], strict=True)
    return tokens, *[np.asarray(column, np.int32) for column in columns]


def _cast(decode: Decode, params: Params) -> Params:
    """Returns the weights in the dtypes of the computation, with the same shardings."""
    if decode.cast is None:
        return params
    wanted = jax.eval_shape(decode.cast, params)
    if jax.tree.map(lambda leaf: leaf.dtype, wanted) == jax.tree.map(lambda leaf: leaf.dtype, params):
        return params
    return jax.jit(decode.cast, out_shardings=jax.tree.map(lambda leaf: leaf.sharding, params))(params)
