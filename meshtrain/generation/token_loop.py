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
NOTHING = -1  # in the place of a token, in rows that are done

# (index of a request, the next ids of its text, whether no more ids follow) -> whether the caller needs no more ids.
Take = Callable[[int, list[int], bool], bool]


@dataclasses.dataclass(frozen=True)
class Request:
    """A request to generate one text for a prompt.

    Attributes:
      ids: the token ids of the prompt, at least one.
      prompt: the index of the prompt among all prompts. Random numbers depend on `prompt` and `sample`.
      sample: the index of the text among the samples for this prompt.
    """

    ids: Sequence[int]
    prompt: int = 0
    sample: int = 0


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class State:
    """The state of a batch of R rows on the devices, between two calls of a compiled function.

    Attributes:
      cache: name -> array, such as the KV cache; `Decode.cache` defines its entries.
      tokens: int32 [R], the last token of each row.
      keys: uint32 [R, words], the data of each row's random key.
      index: int32 scalar, the number of tokens that each row has generated so far.
    """

    cache: Cache
    tokens: jax.Array
    keys: jax.Array
    index: jax.Array


# The carry of the loop in `advance`: tokens generated in this call, the state, bool [R] of rows that are done, and the
# tokens of this call, int32 [R, CALL_TOKENS].
Carry: TypeAlias = tuple[jax.Array, State, jax.Array, jax.Array]
Programs: TypeAlias = tuple[jax.stages.Wrapped, jax.stages.Wrapped]  # the jitted functions `prefill` and `advance`


class Generator:
    """Generates tokens with one set of weights on one mesh. Compiles once for each batch shape and `Sampling`."""

    def __init__(
        self,
        decode: Decode,
        params: Params | None,
        mesh: Mesh,
        rules: Rules,
        end_ids: Sequence[int],
        compiler_options: CompilerOptions | None = None,
    ) -> None:
        """Creates a generator, and casts the weights to the dtypes of the computation.

        Args:
          decode: the task's functions for generation.
          params: the weights on `mesh`, with their shardings; None: `load` provides them later.
          mesh: the mesh; its pipeline axis has size 1.
          rules: logical axis -> mesh axes, for the shardings of cache and batch.
          end_ids: the ids of the tokens that end a text; -1 in place of an id is ignored.
          compiler_options: XLA options by name; None: XLA's defaults.
        """
        self.compiler_options = compiler_options
        self.decode = decode
        self.mesh = mesh
        self.rules = rules
        self.end_ids = end_ids
        self.load(params)
        self.compiled = functools.cache(self._compile)

    def load(self, params: Params | None) -> None:
        """Replaces the weights by `params`, which have the same shardings; None frees the current weights' memory."""
        self.params = None if params is None else _cast(self.decode, params)

    def draw(self, requests: Sequence[Request], num_tokens: int, sampling: Sampling, seed: int, take: Take) -> None:
        """Generates tokens for each request, and passes them to `take`, which may end a request early.

        A request ends at the end token, after `num_tokens` tokens, or when `take` returns True.

        Args:
          requests: the prompts; consecutive requests form a batch.
          num_tokens: maximum number of tokens for each request.
          sampling: temperature, top-k and top-p.
          seed: the seed of the random numbers.
          take: (index of the request, its next ids without the end token, whether no more ids follow) -> whether the
            request needs no more tokens.
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
        """Returns R, the rows of a batch: one per request, but at most 64 rows, and at most 2 GiB of cache per device.

        R is a multiple of the batch's shards, and at least one row per shard.

        Args:
          num_requests: number of texts to generate.
          prompt_length: P, the length of the padded prompts.
          num_steps: maximum number of generated tokens, rounded up by `round_length`.
        """
        shards = num_parts(self.rules.activations["batch"], self.mesh.shape)
        num_bytes = 0
        for entry in self.decode.cache(shards, prompt_length, num_steps).values():
            shape = self._sharding(entry.shape, entry.axes).shard_shape(entry.shape)
            num_bytes += math.prod(shape) * jnp.dtype(entry.dtype).itemsize
        most = max(min(MOST_ROWS // shards, MOST_CACHE_BYTES // max(num_bytes, 1)), 1)
        return shards * min(-(-num_requests // shards), most)

    def _hand_over(self, take: Take, request: int, drawn: np.ndarray, is_last: bool) -> bool:
        """Passes a row's new tokens to `take`; returns whether the row is done.

        Args:
          take: the caller's function, see `draw`.
          request: the index of the row's request.
          drawn: int32 [tokens], the ids of the new tokens; after the row is done, each element is NOTHING (-1).
          is_last: whether the maximum number of tokens is reached.
        """
        tokens = [int(token) for token in drawn if token != NOTHING]
        if tokens and tokens[-1] in self.end_ids:
            tokens, is_last = tokens[:-1], True
        return take(request, tokens, is_last) or is_last

    def _compile(self, sampling: Sampling, num_rows: int, prompt_length: int, num_steps: int) -> Programs:
        """Returns the jitted functions `prefill` and `advance` for these shapes, with shardings for all results.

        Args:
          sampling: temperature, top-k and top-p.
          num_rows, prompt_length: R and P, the shape of the padded prompts.
          num_steps: maximum number of generated tokens, rounded up by `round_length`.
        """
        decode, end_ids = self.decode, np.asarray(self.end_ids, np.int32)
        entries = decode.cache(num_rows, prompt_length, num_steps)
        row = self._sharding((num_rows,), ("batch",))
        replicated = NamedSharding(self.mesh, PartitionSpec())  # replicated, so that each process can read it
        of_cache = {name: self._sharding(entry.shape, entry.axes) for name, entry in entries.items()}

        def next_tokens(logits: jax.Array, keys: jax.Array, index: jax.Array) -> jax.Array:
            # Gather the vocabulary on each device, because top-p sorts it.
            logits = jax.lax.with_sharding_constraint(logits, row)
            return choose(logits, jax.random.wrap_key_data(keys), index, sampling)

        def prefill(
            params: Params, ids: jax.Array, lengths: jax.Array, prompts: jax.Array, samples: jax.Array, key: jax.Array
        ) -> tuple[State, jax.Array]:
            """Processes R prompts, `ids` int32 [R, P]; returns the state and each row's first new token, int32 [R, 1].

            `lengths`, `prompts` and `samples` are int32 [R], see `_rows`; `key` is the data of a random key.
            """
            empty = {name: jnp.zeros(entry.shape, entry.dtype) for name, entry in entries.items()}
            empty = jax.lax.with_sharding_constraint(empty, of_cache)
            logits, cache = decode.prefill(params, ids, lengths, empty)
            keys = jax.random.key_data(row_keys(jax.random.wrap_key_data(key), prompts, samples))
            first = next_tokens(logits, keys, jnp.int32(0))
            return State(cache, first, keys, jnp.int32(1)), first[:, None]

        def advance(params: Params, state: State, done: jax.Array, num_tokens: jax.Array) -> tuple[State, jax.Array]:
            """Generates up to 16 more tokens for each row; returns the state and the tokens, int32 [rows, 16].

            After a row is done, its tokens are NOTHING. The loop ends if all rows are done or have `num_tokens` tokens.
            `done` is bool [rows]: whether a row was done before this call.
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

        of_state: list[Shardings] = [of_cache, row, row, replicated]
        shardings = State(*of_state), replicated
        jit = functools.partial(jax.jit, compiler_options=self.compiler_options, out_shardings=shardings)
        return jit(prefill), jit(advance, donate_argnums=1)

    def _sharding(self, shape: tuple[int, ...], axes: tuple[str | None, ...]) -> NamedSharding:
        return activation_sharding(shape, axes, self.rules, self.mesh, path="cache")


def round_length(length: int) -> int:
    """Rounds a length up to a power of two, at least 64, so that few shapes are compiled.

    >>> round_length(3), round_length(64), round_length(65), round_length(1000)
    (64, 64, 128, 1024)
    """
    return max(SHORTEST, 1 << (length - 1).bit_length())


def _rows(requests: Sequence[Request], num_rows: int, length: int) -> tuple[np.ndarray, ...]:
    """Converts requests to a batch: tokens [R, P], lengths [R], prompt indices [R] and sample indices [R], all int32.

    If there are fewer requests than rows, copies of the last request fill the batch.

    Args:
      requests: the requests, at least one, at most R.
      num_rows: number of rows, R.
      length: number of tokens to which prompts are padded, P.
    """
    filled = [*requests, *[requests[-1]] * (num_rows - len(requests))]
    tokens = np.zeros((num_rows, length), np.int32)
    for row, request in enumerate(filled):
        tokens[row, : len(request.ids)] = request.ids
    columns = zip(*[(len(request.ids), request.prompt, request.sample) for request in filled], strict=True)
    return tokens, *[np.asarray(column, np.int32) for column in columns]


def _cast(decode: Decode, params: Params) -> Params:
    """Returns the weights cast to the dtypes of the computation by `decode.cast`, with unchanged shardings.

    If `decode.cast` is None, the weights are returned unchanged.
    """
    if decode.cast is None:
        return params
    wanted = jax.eval_shape(decode.cast, params)
    if jax.tree.map(lambda leaf: leaf.dtype, wanted) == jax.tree.map(lambda leaf: leaf.dtype, params):
        return params
    return jax.jit(decode.cast, out_shardings=jax.tree.map(lambda leaf: leaf.sharding, params))(params)
