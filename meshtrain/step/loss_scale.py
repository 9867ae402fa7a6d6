"""Loss scaling: small gradients of a 16-bit float are kept from becoming 0 by making all of them larger for a while.

The loss is multiplied before the backward pass and the float32 gradient sums are divided after it (Micikevicius et al.
2018, section 3.2). Scales are powers of two, so that nothing but the exponent of a number changes, and nothing at all
where it fits in both. The dynamic rule is the one of Apex and Megatron-LM: try a larger scale every so often, and go
back when something overflows.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp

from meshtrain.words.options import option

MINIMUM, MAXIMUM = 1.0, 2.0**32


@dataclasses.dataclass(frozen=True)
class LossScaleOptions:
    """By how much the loss is multiplied."""

    mode: str = option("auto", "auto: dynamic where float16 computes, else none", choices=("auto", "none", "dynamic"))
    initial: float = option(65536.0, "scale of the mean loss that the run begins with, a power of two", minimum=MINIMUM)
    growth_steps: int = option(2000, "good steps in a row after which the scale doubles", minimum=1)
    hysteresis: int = option(2, "overflows since it last doubled from which on each one halves the scale", minimum=1)


@dataclasses.dataclass(frozen=True)
class Scaling:
    """How one run scales its loss.

    Attributes:
      options: the rule.
      num_targets: targets in a microbatch, of which the loss is a sum: the scale is that of their mean, as nearly as
        powers of two allow, so that it does not depend on how much is summed up.
    """

    options: LossScaleOptions
    num_targets: int


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LossScale:
    """What the rule remembers.

    Attributes:
      scale: float32 scalar, a power of two; 1 where nothing is scaled.
      num_good: int32 scalar, good steps since the scale last changed or something overflowed.
      tolerance: int32 scalar, overflows that may still pass before one halves the scale.
    """

    scale: jax.Array
    num_good: jax.Array
    tolerance: jax.Array


def check(options: LossScaleOptions, *, computes_in_float16: bool) -> list[str]:
    """Returns one line for each problem that `options.problems` does not see."""
    found = []
    if (options.initial >= MINIMUM and math.frexp(options.initial)[0] != 0.5) or options.initial > MAXIMUM:
        near = min(MAXIMUM, 2.0 ** round(math.log2(options.initial)))
        found.append(
            f"loss_scale.initial: got {options.initial:g}; allowed: a power of two, {MINIMUM:g} to {MAXIMUM:g}; "
            f"nearest: {near:g}"
        )
    if options.mode == "none" and computes_in_float16:
        found.append(
            "loss_scale.mode: got none with float16, whose gradients would be lost below 6e-8; allowed: auto, dynamic; "
            "nearest: loss_scale.mode=auto, or precision.policy=bfloat16"
        )
    return found


def scaling(options: LossScaleOptions, num_targets: int, *, computes_in_float16: bool) -> Scaling | None:
    """Returns how a run scales its loss, None where it does not.

    Args:
      options: checked.
      num_targets: targets in a microbatch.
      computes_in_float16: what "auto" goes by.
    """
    is_on = computes_in_float16 if options.mode == "auto" else options.mode == "dynamic"
    return Scaling(options, num_targets) if is_on else None


def first_scale(scaling: Scaling | None) -> LossScale:
    """Returns what the rule knows before the first step."""
    zero = jnp.zeros((), jnp.int32)
    if scaling is None:
        return LossScale(jnp.ones((), jnp.float32), zero, zero)
    options = scaling.options
    return LossScale(jnp.float32(options.initial), zero, jnp.int32(options.hysteresis))


def seed(scaling: Scaling | None, state: LossScale) -> jax.Array:
    """Returns what a microbatch's sum of losses is multiplied by before its gradient: float32 scalar, power of two.

    Without scaling it is a 1 that the compiler does not know: another program would round differently here and there,
    and scaling is to change nothing but exponents.
    """
    return state.scale if scaling is None else state.scale * 2.0 ** -math.floor(math.log2(scaling.num_targets))


def after(scaling: Scaling | None, state: LossScale, loss: jax.Array, norm: jax.Array) -> tuple[LossScale, jax.Array]:
    """Returns what the rule knows after a step, and whether the scale may be all that was wrong with it, a bool scalar.

    A loss that is no number comes from the forward pass, which knows no scale: the scale stays.

    Args:
      scaling: the rule; None leaves everything as it is.
      state: what it knew before.
      loss: float32 scalar.
      norm: float32 scalar, of all gradients.
    """
    if scaling is None:
        return state, jnp.zeros((), jnp.bool)
    options = scaling.options
    has_loss, has_overflow = jnp.isfinite(loss), jnp.isfinite(loss) & ~jnp.isfinite(norm)
    is_good = has_loss & ~has_overflow
    tolerance = jnp.where(has_overflow, jnp.maximum(state.tolerance - 1, 0), state.tolerance)
    num_good = jnp.where(is_good, state.num_good + 1, 0)
    grows, halves = num_good >= options.growth_steps, has_overflow & (tolerance == 0)
    scale = state.scale * jnp.where(grows, 2.0, jnp.where(halves, 0.5, 1.0))
    new = LossScale(
        jnp.clip(scale, MINIMUM, MAXIMUM),
        jnp.where(grows, 0, num_good),
        jnp.where(grows, options.hysteresis, tolerance),
    )
    return new, has_overflow & (state.scale > MINIMUM)
