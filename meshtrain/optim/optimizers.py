"""Optimizers: a direction by name, decoupled weight decay, the learning rate.

Adam, SGD and Lion are elementwise. Adafactor and Muon reduce over whole weights (not over stacked layers). Run them
under jit, where the partitioner inserts the collectives. In a manual region they would reduce over local shards only.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import optax
from optax.contrib import MuonDimensionNumbers, scale_by_muon

from meshtrain.layout.stored import Names
from meshtrain.optim import moments, trainable
from meshtrain.optim.adafactor import scale_by_adafactor
from meshtrain.optim.learning_rate import Schedule
from meshtrain.optim.masks import decays, is_hidden_matrix, is_router_bias, map_axes, matrix_dims
from meshtrain.words.errors import UserError
from meshtrain.words.options import AllBut, option, problems

NAMES = ("adamw", "adam", "sgd", "lion", "adafactor", "muon")

# The root mean square of Muon's updates, about that of Adam's, so that both share a learning rate and a weight decay
# (Liu et al. 2025, "Muon is Scalable for LLM Training", section 2.2).
MUON_RMS = 0.2


@dataclasses.dataclass(frozen=True)
class OptimizerOptions:
    """How weights move along their gradients."""

    name: str = option(
        "adamw", "the optimizer; adafactor's learning rate is relative to the size of each weight", choices=NAMES
    )
    beta1: float = option(
        0.9,
        "decay of the first moment (adamw, adam, lion, muon outside its matrices)",
        minimum=0.0,
        only_for={"name": ("adamw", "adam", "lion", "muon")},
    )
    beta2: float = option(
        0.95,
        "decay of the second moment (adamw, adam, muon outside its matrices) or of lion's momentum (0.99 is usual)",
        minimum=0.0,
        only_for={"name": ("adamw", "adam", "lion", "muon")},
    )
    epsilon: float = option(
        1e-8,
        "added to the root of the second moment (adamw, adam, muon outside its matrices)",
        minimum=0.0,
        only_for={"name": ("adamw", "adam", "muon")},
    )
    weight_decay: float = option(
        0.1,
        "decoupled weight decay of matrices and tables, times the learning rate; without effect on adam",
        minimum=0.0,
        only_for={"name": ("adamw", "sgd", "lion", "adafactor", "muon")},
    )
    momentum: float = option(
        0.95,
        "decay of the momentum in sgd (0.9 is usual) and of muon's matrices",
        minimum=0.0,
        only_for={"name": ("sgd", "muon")},
    )
    moments: str = option(
        "float32",
        "how moments are stored: float32 (4 bytes each), bfloat16 (2) or 8bit (1, matrices and tables alone)",
        choices=moments.KINDS,
        only_for={"name": ("adamw", "adam", "sgd", "lion", "muon")},
    )
    moment_block: int = option(
        256,
        "elements of a matrix that share a scale, with 8-bit moments; a power of two",
        only_for={"moments": ("8bit",), "name": ("adamw", "adam", "sgd", "lion", "muon")},
    )
    balance_rate: float = option(
        0.001,
        "by which the bias of an expert moves in a step against its load, with model.router=sigmoid",
        minimum=0.0,
        only_for={"model.router": ("sigmoid",), "model.num_experts": AllBut(0)},
    )
    clip_norm: float = option(1.0, "gradients are scaled down to this global norm; 0 means never", minimum=0.0)
    trainable: str = option(
        "",
        "regular expression found in the paths of trained weights; other weights are frozen; '': all are trained (with "
        "lora.rank, adapters alone)",
    )


def check(options: OptimizerOptions, path: str = "optimizer") -> list[str]:
    """Returns one line for each problem that `options.problems` does not check: limits from above, and the pattern."""
    above = [
        f"{path}.{name}: got {getattr(options, name)}; allowed: at least 0 and below 1; nearest: 0.999"
        for name in ("beta1", "beta2", "momentum")
        if getattr(options, name) >= 1
    ]
    above += moments.check_block(options.moment_block, f"{path}.moment_block")
    return above + trainable.check(options.trainable, f"{path}.trainable")


def optimizer(options: OptimizerOptions, schedule: Schedule, logical_axes: Any) -> optax.GradientTransformation:
    """Returns the optimizer: from float32 parameters and gradients to float32 updates to add to the parameters.

    With direction u and learning rate a, the update of a weight w is -a (u + weight_decay * w). The second term
    applies to weights where `masks.decays` is true, and never with "adam". The step applies `clip_norm` and
    `trainable`. The biases of routers stay and have no moments: `Task.after_update` moves them.

    >>> axes = {"kernel": ("embed", "mlp"), "bias": ("mlp",)}
    >>> adamw = optimizer(OptimizerOptions(weight_decay=0.5), lambda count: jnp.float32(0.01), axes)
    >>> params = {"kernel": jnp.ones((2, 3)), "bias": jnp.ones(3)}
    >>> updates, _ = adamw.update(jax.tree.map(jnp.zeros_like, params), adamw.init(params), params)
    >>> print(updates["kernel"][0, 0], jnp.any(updates["bias"]))  # 0.01 * 0.5 * the weight, matrices only
    -0.005 False

    Args:
      options: name and hyperparameters.
      schedule: the learning rate, a function of the number of updates done so far.
      logical_axes: a tree like the parameters that it will update, with a tuple of logical axes for each weight.

    Returns:
      A transformation whose `update` needs the parameters. Its moments are stored as `options.moments` says; those of
      adafactor are float32.

    Raises:
      UserError: options out of bounds, one line each.
    """
    lines = problems(options, "optimizer") + check(options)
    if lines:
        raise UserError(*lines)
    weight_decay = 0.0 if options.name == "adam" else options.weight_decay
    labels = map_axes(lambda axes: "biases" if is_router_bias(axes) else "others", logical_axes)
    logical_axes = map_axes(lambda axes: optax.MaskedNode() if is_router_bias(axes) else axes, logical_axes)
    direction = _direction(options, logical_axes)
    if options.name != "adafactor":
        direction = moments.stored(direction, options.moments, options.moment_block, logical_axes)
    moved = optax.chain(
        direction,
        optax.add_decayed_weights(weight_decay, decays(logical_axes)),
        optax.scale_by_learning_rate(schedule),
    )
    if "biases" not in jax.tree.leaves(labels):
        return moved
    return optax.partition({"biases": optax.set_to_zero(), "others": moved}, labels)


def _direction(options: OptimizerOptions, logical_axes: Any) -> optax.GradientTransformation:
    """Returns the optimizer without weight decay and learning rate."""
    adam = optax.scale_by_adam(options.beta1, options.beta2, options.epsilon, mu_dtype=jnp.float32)
    if options.name in ("adamw", "adam"):
        return adam
    if options.name == "sgd":
        return optax.trace(options.momentum, accumulator_dtype=jnp.float32)
    if options.name == "lion":
        return optax.scale_by_lion(options.beta1, options.beta2, mu_dtype=jnp.float32)
    if options.name == "adafactor":
        return scale_by_adafactor(logical_axes)
    assert options.name == "muon", options.name
    labels = map_axes(lambda axes: "muon" if is_hidden_matrix(axes) else "adam", logical_axes)
    return optax.partition({"muon": _muon(options.momentum, logical_axes), "adam": adam}, labels)


def _muon(momentum: float, logical_axes: Any) -> optax.GradientTransformation:
    """Returns Muon (Jordan et al. 2024) for the hidden matrices of a tree that has a `MaskedNode` for any other weight.

    The dims of each matrix are passed explicitly. By default optax treats exactly the weights of two dims as matrices,
    so stacked layers would use Adam and stacked norms Muon.
    """

    def dimension_numbers(axes: Names) -> Any:
        dims = matrix_dims(axes)
        return MuonDimensionNumbers(*dims) if dims is not None and is_hidden_matrix(axes) else optax.MaskedNode()

    dimensions = map_axes(dimension_numbers, logical_axes)

    def scale(update: jax.Array, dims: MuonDimensionNumbers) -> jax.Array:
        sizes = [math.prod(update.shape[dim] for dim in part) for part in (dims.reduction_axis, dims.output_axis)]
        return update * (MUON_RMS * math.sqrt(max(sizes)))

    def scale_all(updates: Any, params: Any) -> Any:
        del params
        return jax.tree.map(scale, updates, dimensions)

    return optax.chain(
        scale_by_muon(beta=momentum, mu_dtype=jnp.float32, weight_dimension_numbers=dimensions),
        optax.stateless(scale_all),
    )
