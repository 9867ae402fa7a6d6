"""Loss scaling: keeps small gradients in float16 from underflowing to 0.

The loss is multiplied by the scale before the backward pass, and the float32 gradient sums are divided by the scale
after it (Micikevicius et al. 2018, section 3.2). Scales are powers of two, which change only exponents. So results are
bitwise the same if nothing underflows or overflows. The dynamic rule follows Apex and Megatron-LM: the scale doubles
after a number of good steps, and halves after an overflow.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp

from meshtrain.errors import Problem
from meshtrain.options import option
from meshtrain.sharding.trees import Arrays

MINIMUM, MAXIMUM = 1.0, 2.0**32
_SCALED = {"the loss is not scaled": (False,)}


@dataclasses.dataclass(frozen=True)
class LossScaleOptions:
    """When and how the loss is scaled for the backward pass."""

    mode: str = option(
        "auto", "auto: dynamic if activations are float16, else none", choices=("auto", "none", "dynamic")
    )
    initial: float = option(
        65536.0, "scale of the mean loss at the start of the run, a power of two", minimum=MINIMUM,
        only_for=_SCALED,
    )  # fmt: skip
    growth_steps: int = option(
        2000, "consecutive steps without overflow after which the scale doubles", minimum=1, only_for=_SCALED
    )
    hysteresis: int = option(
        2,
        "number of overflows since the last doubling; from this number on, each overflow halves the scale",
        minimum=1,
        only_for=_SCALED,
    )


@dataclasses.dataclass(frozen=True)
class Scaling:
    """The loss scaling of a run.

    Attributes:
      options: the rule for changing the scale.
      num_targets: number of targets in the global batch. The backward pass multiplies the task's loss, a sum over
        targets, by scale / n, where n is `num_targets` rounded down to a power of two. So a suitable scale depends
        neither on the batch size nor on the number of microbatches.
      largest: the largest finite gradient in the backward pass; infinity for float32 and bfloat16.
    """

    options: LossScaleOptions
    num_targets: int
    largest: float = math.inf


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LossScale:
    """The loss scale's part of the training state.

    Attributes:
      scale: float32 scalar, a power of two; 1 without loss scaling.
      num_good: int32 scalar, number of consecutive steps with finite loss and gradients since the scale last doubled.
      tolerance: int32 scalar, hysteresis minus the overflows since the scale last doubled, at least 0.
    """

    scale: jax.Array
    num_good: jax.Array
    tolerance: jax.Array


def check(options: LossScaleOptions, *, computes_in_float16: bool) -> list[Problem]:
    """Returns an error line for each invalid option of loss scaling; [] if all options are valid.

    The possible errors: the initial scale is not a power of two from `MINIMUM` to `MAXIMUM`; or activations are float16
    and the loss is not scaled. The minimum and the choices of each option are checked by `options.problems`, not here.

    Args:
      options: the options of loss scaling.
      computes_in_float16: whether activations are float16.
    """
    lines = []
    if (options.initial >= MINIMUM and math.frexp(options.initial)[0] != 0.5) or options.initial > MAXIMUM:
        fix = min(MAXIMUM, 2.0 ** round(math.log2(options.initial)))
        lines.append(
            Problem(
                "loss_scale.initial",
                got=f"{options.initial:g}",
                allowed=f"a power of two, {MINIMUM:.0f} to {MAXIMUM:.0f}",
                nearest=f"{fix:.0f}",
            )
        )
    if options.mode == "none" and computes_in_float16:
        lines.append(
            Problem(
                "loss_scale.mode",
                got="none with float16, whose gradients would be lost below 6e-8",
                allowed="auto, dynamic",
                nearest="loss_scale.mode=auto, or precision.policy=bfloat16",
                depends_on=["precision.policy", "precision.compute_dtype"],
            )
        )
    return lines


def scaling(options: LossScaleOptions, num_targets: int, *, computes_in_float16: bool) -> Scaling | None:
    """Returns the loss scaling of a run; None if the loss is not scaled.

    Args:
      options: options for which `check` returns no problems.
      num_targets: number of targets in the global batch.
      computes_in_float16: whether activations are float16. Then mode "auto" means dynamic, and gradients have the range
        of float16.
    """
    is_on = computes_in_float16 if options.mode == "auto" else options.mode == "dynamic"
    largest = float(jnp.finfo(jnp.float16).max) if computes_in_float16 else math.inf
    return Scaling(options, num_targets, largest) if is_on else None


def first_scale(scaling: Scaling | None) -> LossScale:
    """Returns the loss scale before the first step: the initial scale, or 1 if `scaling` is None."""
    zero = jnp.zeros((), jnp.int32)
    if scaling is None:
        return LossScale(jnp.ones((), jnp.float32), zero, zero)
    options = scaling.options
    return LossScale(jnp.float32(options.initial), zero, jnp.int32(options.hysteresis))


def seed(scaling: Scaling | None, state: LossScale) -> jax.Array:
    """Returns the factor by which the backward pass multiplies a microbatch's loss: float32 scalar, a power of two.

    The loss of a microbatch is a sum over targets. With scaling the factor is scale / n, where n is the number of
    targets in the global batch, rounded down to a power of two. Without scaling the result is `state.scale`, an array
    with the value 1. The compiler does not know this value, so the program and its rounding are the same with and
    without scaling.

    Args:
      scaling: the loss scaling; None: the loss is not scaled.
      state: the loss scale before the step.
    """
    return state.scale if scaling is None else state.scale * 2.0 ** -math.floor(math.log2(scaling.num_targets))


def mark_overflows(scaling: Scaling | None, squares: jax.Array, gradients: Arrays, factor: jax.Array) -> jax.Array:
    """Returns `squares` with infinity for each gradient that was beyond the range of float16 in the backward pass.

    A device sums gradients in float16 within a microbatch, and in float32 across microbatches. With this rule the same
    steps overflow for any number of microbatches.

    Args:
      scaling: the loss scaling; None: `squares` is returned unchanged.
      squares: float32 [leaves], the sum of squares of each gradient.
      gradients: a pytree of float32 arrays, the gradients of the mean loss.
      factor: float32 scalar by which the gradients of the backward pass were divided to get `gradients`: the number of
        targets times the result of `seed`.
    """
    if scaling is None or scaling.largest == math.inf:
        return squares
    most = jnp.stack([jnp.max(jnp.abs(gradient)) for gradient in jax.tree.leaves(gradients)])
    return jnp.where(most * factor > scaling.largest, jnp.inf, squares)


def after(scaling: Scaling | None, state: LossScale, loss: jax.Array, norm: jax.Array) -> tuple[LossScale, jax.Array]:
    """Returns the loss scale after a step; and a bool scalar, true if a smaller scale may avoid the step's overflow.

    An overflow is a finite loss with non-finite gradients. The bool is true if a step has an overflow and its scale is
    above the minimum. If the loss is not finite, the scale does not change, because no scale affects the forward pass.

    Args:
      scaling: the loss scaling; None: the scale does not change.
      state: the loss scale before the step.
      loss: float32 scalar, the mean loss of the step.
      norm: float32 scalar, the global norm of the gradients.
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
