"""Learning rates as functions of the number of updates done so far.

`count` is the number of earlier updates (0 for the first), and `step = count + 1`.
"""

import dataclasses
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

from meshtrain.errors import Problem, UserError, refuse
from meshtrain.options import WITH_OPTIONS, Except, option, problems
from meshtrain.user_functions import FORM, call_user_function, wrap_user_errors

KEY = "learning_rate.name"
NAMES = ("constant", "linear", "cosine", "inverse_sqrt", "noam", "warmup_stable_decay")
DECAYING = ("linear", "cosine", "warmup_stable_decay")
BATCH_SCALINGS = ("none", "linear", "sqrt")

Schedule = Callable[[jax.Array | int], jax.Array]
# Updates since the start of a part of the schedule -> the rate as a share of the peak.
Share = Callable[[jax.Array], jax.Array]


@dataclasses.dataclass(frozen=True)
class LearningRateOptions:
    """Options of the learning rate over the run."""

    name: str = option(
        "cosine",
        f"the schedule after the warm-up: {', '.join(NAMES)}, or a custom {FORM}",
        choices=NAMES,
        names=WITH_OPTIONS,
    )
    peak: float = option(
        1e-3, "peak learning rate; noam does not use it, see noam_factor", minimum=0.0,
        only_for={"name": Except("noam")},
    )  # fmt: skip
    warmup_steps: int = option(100, "updates of linear warm-up; the last update has the peak; 0: none", minimum=0)
    decay_steps: int = option(
        0, "updates from the run's start to the end of the decay; 0 means num_steps", minimum=0,
        only_for={"name": DECAYING},
    )  # fmt: skip
    final_fraction: float = option(
        0.1, "final rate of linear, cosine, warmup_stable_decay, a share of the peak", minimum=0.0,
        only_for={"name": DECAYING},
    )  # fmt: skip
    stable_fraction: float = option(
        0.8, "warmup_stable_decay: share of the steps after warm-up that have the peak", minimum=0.0,
        only_for={"name": ("warmup_stable_decay",)},
    )  # fmt: skip
    noam_factor: float = option(1.0, "factor of noam, which has no peak", minimum=0.0, only_for={"name": ("noam",)})
    batch_scaling: str = option(
        "none", "multiply by batch_size / base_batch_size or its square root", choices=BATCH_SCALINGS
    )
    base_batch_size: int = option(
        0, "the batch_size that the peak was tuned for; 0: not set", minimum=0,
        only_for={"batch_scaling": ("linear", "sqrt")},
    )  # fmt: skip


def check(options: LearningRateOptions) -> list[Problem]:
    """Returns an error line for each invalid option of the learning rate; [] if all options are valid.

    The possible errors: `final_fraction` or `stable_fraction` is above 1; the decay ends before the warm-up does, or
    with it; or `batch_scaling` is on and `base_batch_size` is 0. The minimum and the choices of each option are checked
    by `options.problems`, not here.
    """
    lines = [
        Problem(f"learning_rate.{name}", got=getattr(options, name), allowed="a share from 0 to 1", nearest="1.0")
        for name in ("final_fraction", "stable_fraction")
        if getattr(options, name) > 1
    ]
    if options.name in DECAYING and 0 < options.decay_steps <= options.warmup_steps:
        lines.append(
            Problem(
                "learning_rate.decay_steps",
                got=options.decay_steps,
                allowed=f"0 (num_steps), or more than learning_rate.warmup_steps = {options.warmup_steps}",
                nearest=options.warmup_steps + 1,
                depends_on=["num_steps", "learning_rate.warmup_steps"],
            )
        )
    if options.batch_scaling != "none" and options.base_batch_size == 0:
        lines.append(
            Problem(
                "learning_rate.base_batch_size",
                got=0,
                condition=f"with learning_rate.batch_scaling '{options.batch_scaling}'",
                allowed="at least 1, the batch_size that the peak was tuned for",
                nearest="learning_rate.batch_scaling 'none'",
                depends_on=["learning_rate.batch_scaling", "batch_size"],
            )
        )
    return lines


def learning_rate(options: LearningRateOptions, *, num_steps: int, embed_dim: int, batch_size: int) -> Schedule:
    """Returns the learning rate as a function of the number of updates done so far (an optax schedule).

    With w = warmup_steps, T = decay_steps or num_steps, f = final_fraction, and p = (count - w) / (T - w), clipped to
    0..1:

        warm-up              peak * step / w                                     step <= w, all but noam
        constant             peak
        linear               peak * (1 - (1 - f) p)
        cosine               peak * (f + (1 - f) (1 + cos(pi p)) / 2)            Loshchilov and Hutter 2017
        inverse_sqrt         peak * sqrt(max(w, 1) / step)                       Raffel et al. 2020
        noam                 noam_factor * embed_dim^-0.5 * min(step^-0.5, step * w^-1.5)    Vaswani et al. 2017
        warmup_stable_decay  peak, then linear in the last 1 - stable_fraction   Hu et al. 2024
        a user's function    peak * function(options)(count), with decay_steps = T in the options

    The first update of a warm-up has the rate peak / w. The decay reaches f at count T, one update after the last, so
    the last update still has a rate above 0 if f = 0. A run shorter than its warm-up ends before the peak. Noam uses w
    = 1 if w = 0. A run that is resumed with another num_steps has another decay, unless decay_steps is set.

    The rate is multiplied by batch_size / base_batch_size if batch_scaling is "linear" (Goyal et al. 2017), and by the
    square root of this ratio if it is "sqrt" (Malladi et al. 2022, for Adam and its relatives).

    >>> options = LearningRateOptions(name="linear", peak=0.001, warmup_steps=10, final_fraction=0.1)
    >>> schedule = learning_rate(options, num_steps=110, embed_dim=64, batch_size=32)
    >>> [round(float(schedule(count)), 6) for count in (0, 9, 60, 110)]
    [0.0001, 0.001, 0.00055, 0.0001]

    Args:
      options: the options of the learning rate.
      num_steps: number of updates in the run.
      embed_dim: width of the model, for noam.
      batch_size: number of sequences in the global batch.

    Returns:
      A function of an int32 scalar or array, usable under jit, to float32 of the same shape.

    Raises:
      UserError: options are out of bounds, one line each; or a user's function is invalid, one line.
    """
    refuse(problems(options, "learning_rate") + check(options))
    ratio = batch_size / options.base_batch_size if options.batch_scaling != "none" else 1.0
    factor = math.sqrt(ratio) if options.batch_scaling == "sqrt" else ratio
    if options.name == "noam":
        return _noam(factor * options.noam_factor, embed_dim, max(options.warmup_steps, 1))
    starts, shares = zip(*_parts(options, options.decay_steps or num_steps), strict=True)

    def warmup(count: jax.Array) -> jax.Array:
        return (count + 1).astype(jnp.float32) / max(options.warmup_steps, 1)

    share_of_peak = optax.join_schedules((warmup, *shares), starts)

    def schedule(count: jax.Array | int) -> jax.Array:
        return options.peak * factor * share_of_peak(jnp.asarray(count))

    return schedule


def _noam(factor: float, embed_dim: int, warmup_steps: int) -> Schedule:
    def schedule(count: jax.Array | int) -> jax.Array:
        step = (jnp.asarray(count) + 1).astype(jnp.float32)
        return factor * embed_dim**-0.5 * jnp.minimum(1 / jnp.sqrt(step), step * warmup_steps**-1.5)

    return schedule


def _parts(options: LearningRateOptions, end: int) -> list[tuple[int, Share]]:
    """Returns (first count, function) of each part of the schedule after the warm-up.

    The function maps the number of updates since the first count to the rate as a share of the peak.

    Args:
      options: the options of the learning rate, with any name except noam.
      end: the number of updates after which the decay ends: T in `learning_rate`.
    """
    first, final = options.warmup_steps, options.final_fraction
    start_of_decay = first + math.floor(options.stable_fraction * max(end - first, 0))

    def progress(count: jax.Array, start: int) -> jax.Array:
        # `join_schedules` has subtracted the start in integers, which is exact in runs of any length. A run may end
        # within its warm-up, hence the max.
        return jnp.clip(count.astype(jnp.float32) / max(end - start, 1), 0, 1)

    def constant(count: jax.Array) -> jax.Array:
        return jnp.ones(count.shape, jnp.float32)

    def linear(start: int) -> Share:
        return lambda count: 1 - (1 - final) * progress(count, start)

    def cosine(count: jax.Array) -> jax.Array:
        return final + (1 - final) * 0.5 * (1 + jnp.cos(jnp.pi * progress(count, first)))

    def inverse_sqrt(count: jax.Array) -> jax.Array:
        return jnp.sqrt(max(first, 1) / (first + count + 1).astype(jnp.float32))

    parts: dict[str, list[tuple[int, Share]]] = {
        "constant": [(first, constant)],
        "linear": [(first, linear(first))],
        "cosine": [(first, cosine)],
        "inverse_sqrt": [(first, inverse_sqrt)],
        "warmup_stable_decay": [(first, constant), (start_of_decay, linear(start_of_decay))],
    }
    if options.name in parts:
        return parts[options.name]
    return [(first, _user_schedule(dataclasses.replace(options, decay_steps=end)))]


def _user_schedule(options: LearningRateOptions) -> Share:
    """Returns the schedule of a user's function: number of updates since the warm-up -> rate as a share of the peak.

    The user's function gets the number of updates since the start of the run.

    Raises:
      UserError: the function is invalid, or its result is not a scalar.
    """
    wanted = "a function that maps the number of updates (a JAX int32 scalar) to a share of the peak"
    share = call_user_function(
        KEY, options.name, NAMES, [options], takes="options", gives=wanted, fix="correct the function"
    )
    fix = "jnp.where or jnp.minimum instead of `if`"
    with wrap_user_errors(Problem(KEY, got=f"'{options.name}', whose result", allowed=wanted, nearest=fix)):
        got = jax.eval_shape(lambda count: jnp.asarray(share(count)), jax.ShapeDtypeStruct((), jnp.int32))
    if got.shape:
        given = f"'{options.name}', which returns an array of shape {list(got.shape)}"
        raise UserError(Problem(KEY, got=given, allowed=wanted, nearest="a scalar"))
    return lambda count: jnp.asarray(share(count + options.warmup_steps), jnp.float32)
