"""Rotary positions (Su et al. 2021), and the scaling of all or only of low frequencies for longer texts."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp


class Scaling(NamedTuple):
    """The scaling of rotary frequencies: low frequencies, or all of them, are divided by `factor`.

    `linear` divides all frequencies (Chen et al. 2023). Otherwise a frequency of at most `low` turns in
    `original_length` tokens is divided, and a frequency of at least `high` turns is unchanged. Frequencies in between
    are interpolated: linearly in the turns with `llama3` (its reference code), or linearly in the index of the pair of
    channels with `yarn` (Peng et al. 2023, section 3.2).

    Attributes:
      factor: divisor of frequencies, above 1.
      low: turns in `original_length` tokens up to which a frequency is divided.
      high: turns in `original_length` tokens from which a frequency is unchanged.
      original_length: sequence length without scaling, in tokens.
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
        """Returns the unscaled share of each frequency, float32 [H / 2]: 0 (divided by `factor`) to 1 (unchanged).

        Args:
          frequencies: float32 [H / 2], in radians per token, highest first.
          base: theta, from which the frequencies were computed.
        """
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
      head_dim: number of rotary channels of a head, H; even.
      base: theta, 10,000 in the paper.
      scaling: scaling of the frequencies; None: no scaling.
    """
    frequencies = base ** (-jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim)
    if scaling is not None:
        unscaled = scaling.unscaled(frequencies, base)
        frequencies = frequencies * (unscaled + (1.0 - unscaled) / scaling.factor)
    return positions[..., None].astype(jnp.float32) * frequencies


def rotate(x: jax.Array, angles: jax.Array, stretch: jax.Array | float | None = None) -> jax.Array:
    """Rotates the pair of channels (x[i], x[i + H / 2]) of each head by angle i, and multiplies it by `stretch`.

    The computation is in float32; the result has the shape and dtype of `x`.

    Args:
      x: queries or keys [b, T, heads, H].
      angles: float32 [b, T, H / 2], in radians, see `rotary_angles`.
      stretch: factor of the rotated pairs, a number or float32 scalar; None: 1.
    """
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cosine, sine = jnp.cos(angles)[:, :, None, :], jnp.sin(angles)[:, :, None, :]
    if stretch is not None:
        cosine, sine = stretch * cosine, stretch * sine
    return jnp.concatenate([first * cosine - second * sine, second * cosine + first * sine], axis=-1).astype(x.dtype)


def rotate_neighbours(x: jax.Array, angles: jax.Array) -> jax.Array:
    """Rotates the pair of channels (x[2 i], x[2 i + 1]) of each head by angle i, in float32; returns [b, T, heads, H].

    The channels of the result are reordered: pair i is at i and i + H / 2, as in `rotate`.

    Args:
      x: queries or keys [b, T, heads, H].
      angles: float32 [b, T, H / 2], in radians.
    """
    return rotate(jnp.concatenate([x[..., 0::2], x[..., 1::2]], axis=-1), angles)
