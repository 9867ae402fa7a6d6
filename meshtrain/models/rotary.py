"""Rotary positions (Su et al. 2021), and their scaling to longer texts: of all frequencies, or only of low ones."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp


class Scaling(NamedTuple):
    """The frequencies to divide by `factor`: with `linear` all of them (Chen et al. 2023), otherwise the low ones.

    A frequency of at most `low` turns in `original_length` tokens is divided; a frequency of at least `high` turns is
    unchanged. Frequencies in between are interpolated: linearly in the turns with `llama3` (its reference code), or in
    the index of the pair of channels with `yarn` (Peng et al. 2023, section 3.2).

    Attributes:
      factor: above 1.
      low: in turns.
      high: in turns.
      original_length: in tokens.
      kind: `linear`, `llama3` or `yarn`.
      whole_pairs: whether YaRN rounds the bounds of the interpolated pairs outwards, to integers.
    """

    factor: float
    low: float
    high: float
    original_length: int
    kind: str = "llama3"
    whole_pairs: bool = True

    def unscaled(self, frequencies: jax.Array, base: float) -> jax.Array:
        """Returns the share of each frequency, float32 [H / 2], that is not scaled: 0 to 1."""
        if self.kind == "linear":
            return jnp.zeros_like(frequencies)
        if self.kind == "llama3":
            turns = self.original_length * frequencies / (2 * math.pi)
            return jnp.clip((turns - self.low) / (self.high - self.low), 0.0, 1.0)
        num = len(frequencies)
        # Pair i has original_length base^(-i / num) / 2 pi turns.
        first, last = (num * math.log(self.original_length / (2 * math.pi * turns)) / math.log(base)
                       for turns in (self.high, self.low))  # fmt: skip
        if self.whole_pairs:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, 2 * num - 1)
        return 1.0 - jnp.clip((jnp.arange(num) - first) / max(last - first, 1e-3), 0.0, 1.0)


def rotary_angles(positions: jax.Array, head_dim: int, base: float, scaling: Scaling | None) -> jax.Array:
    """Returns the angle of each pair of channels at each position, float32 [b, T, H / 2]: position * base^(-2i / H).

    Args:
      positions: int32 [b, T].
      head_dim: H, even.
      base: theta, 10,000 in the paper.
      scaling: of the frequencies, or None.
    """
    frequencies = base ** (-jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim)
    if scaling is not None:
        unscaled = scaling.unscaled(frequencies, base)
        frequencies = frequencies * (unscaled + (1.0 - unscaled) / scaling.factor)
    return positions[..., None].astype(jnp.float32) * frequencies


def rotate(x: jax.Array, angles: jax.Array, stretch: jax.Array | float | None = None) -> jax.Array:
    """Rotates the pair (x[i], x[i + H / 2]) of each head by its angle, in float32, and multiplies it by `stretch`.

    Args:
      x: [b, T, heads, H].
      angles: float32 [b, T, H / 2].
      stretch: float32 scalar; None: 1.
    """
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cosine, sine = jnp.cos(angles)[:, :, None, :], jnp.sin(angles)[:, :, None, :]
    if stretch is not None:
        cosine, sine = stretch * cosine, stretch * sine
    return jnp.concatenate([first * cosine - second * sine, second * cosine + first * sine], axis=-1).astype(x.dtype)


def rotate_neighbours(x: jax.Array, angles: jax.Array) -> jax.Array:
    """Rotates the pair (x[2 i], x[2 i + 1]) of each head by its angle.

    Returns the pairs as two halves, see `rotate`.
    """
    return rotate(jnp.concatenate([x[..., 0::2], x[..., 1::2]], axis=-1), angles)
