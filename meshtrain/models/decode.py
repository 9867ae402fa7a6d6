"""The contract for generating tokens one after the other, with a cache of what was computed for the tokens before.

R: rows, each one text; P: tokens a prompt after padding; V: padded vocabulary.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import TypeAlias

import jax

from meshtrain.models.entry import Entry
from meshtrain.sharding.trees import Arrays

Cache: TypeAlias = Arrays  # a dict of arrays, as `Decode.cache` describes them
Params: TypeAlias = Arrays  # nested dicts of arrays


@dataclasses.dataclass(frozen=True)
class Decode:
    """How a task generates tokens. The same loop serves decoders and encoder-decoders.

    Every row has its own prompt and its own position, both of which the cache holds. A decoder's prompt is the
    beginning of the text. An encoder-decoder's prompt is the source: `prefill` encodes it, computes the keys and values
    of cross-attention once, and feeds the begin token of the target.

    Attributes:
      prefill: (params, tokens int32 [R, P], lengths int32 [R], cache) -> (logits float32 [R, V], cache). It reads the
        prompts into an empty cache. `tokens` are padded on the right with any legal id; row i has `lengths[i]` >= 1
        tokens. The logits are those of each row's first new token, padding of the vocabulary at minus infinity.
      step: (params, tokens int32 [R], cache) -> (logits float32 [R, V], cache). It appends one token to each row. The
        cache keeps its shapes and dtypes. A row that is done may get any legal token.
      cache: (R, P, number of calls of `step` at most) -> name -> `Entry`, of a cache for prompts padded to P. An empty
        cache has zeros in every array. The activation rules place it, as they place a batch.
      cast: params -> params in the dtypes in which they compute, applied once before the loop; None: as they are.
      continues: whether the text continues the prompt: both count the same positions and are shown together. False: the
        prompt is the source of an encoder-decoder.
      max_prompt: most tokens in a prompt; 0: any number, as far as `max_positions` allows.
      max_positions: most positions, those of the prompt included where the text `continues` it; 0: any number.
      trained_positions: positions in the sequences of training, counted likewise. Beyond them text may be poor. 0:
        unknown.
    """

    prefill: Callable[[Params, jax.Array, jax.Array, Cache], tuple[jax.Array, Cache]]
    step: Callable[[Params, jax.Array, Cache], tuple[jax.Array, Cache]]
    cache: Callable[[int, int, int], Mapping[str, Entry]]
    cast: Callable[[Params], Params] | None = None
    continues: bool = True
    max_prompt: int = 0
    max_positions: int = 0
    trained_positions: int = 0
