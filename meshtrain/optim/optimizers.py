"""Makes an optimizer from a direction (such as Adam's), weight decay and the learning rate, or from a user's function.

Adam, SGD and Lion are elementwise. Adafactor and Muon reduce over complete weights (not over stacked layers). Run them
under jit, where the partitioner inserts the collectives. In a manual region they would reduce over local shards only.
"""

import dataclasses
import inspect
import math
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import optax
from optax.contrib import MuonDimensionNumbers, scale_by_muon

from meshtrain.errors import Problem, UserError, refuse
from meshtrain.optim import moments
from meshtrain.optim.adafactor import scale_by_adafactor
from meshtrain.optim.average import with_averages
from meshtrain.optim.learning_rate import Schedule
from meshtrain.options import WITH_OPTIONS, Except, option, problems
from meshtrain.sharding import trainable
from meshtrain.sharding.param_kinds import decays, is_hidden_matrix, is_router_bias, map_axes, matrix_dims
from meshtrain.sharding.param_sharding import Names
from meshtrain.sharding.trees import Arrays, NamesTree, leaves_with_paths
from meshtrain.user_functions import FORM, call_user_function, import_function, wrap_user_errors

KEY = "optimizer.name"

# The root mean square of Muon's updates, about the same as of Adam's updates, so that both can share a learning rate
# and a weight decay (Liu et al. 2025, "Muon is Scalable for LLM Training", section 2.2).
MUON_RMS = 0.2


def _adam(axes: NamesTree, *, beta1: float, beta2: float, epsilon: float) -> optax.GradientTransformation:
    return optax.scale_by_adam(beta1, beta2, epsilon, mu_dtype=jnp.float32)


def _sgd(axes: NamesTree, *, momentum: float) -> optax.GradientTransformation:
    return optax.trace(momentum, accumulator_dtype=jnp.float32)


def _lion(axes: NamesTree, *, beta1: float, beta2: float) -> optax.GradientTransformation:
    return optax.scale_by_lion(beta1, beta2, mu_dtype=jnp.float32)


def _muon(
    axes: NamesTree, *, momentum: float, muon_bias_correction: bool, beta1: float, beta2: float, epsilon: float
) -> optax.GradientTransformation:
    labels = map_axes(lambda names: "muon" if is_hidden_matrix(names) else "adam", axes)
    adam = _adam(axes, beta1=beta1, beta2=beta2, epsilon=epsilon)
    return optax.partition({"muon": _of_matrices(momentum, muon_bias_correction, axes), "adam": adam}, labels)


def _of_matrices(momentum: float, bias_correction: bool, logical_axes: NamesTree) -> optax.GradientTransformation:
    """Returns Muon (Jordan et al. 2024) for the hidden matrices of a pytree; other weights must be `MaskedNode`s.

    With gradient g and momentum b <- g + momentum * b, the update is g + momentum * b, made orthogonal and scaled to a
    root mean square of about `MUON_RMS`.

    The dims of each matrix are passed explicitly. By default optax treats exactly the weights of two dims as matrices,
    so stacked layers would use Adam and stacked norms Muon.

    Args:
      momentum: the decay of the momentum b.
      bias_correction: whether b and g are divided by 1 - momentum^t, as in Adam, before they are added (the variant of
        optax).
      logical_axes: a pytree with a tuple of logical axes for each weight.
    """

    def dimension_numbers(axes: Names) -> MuonDimensionNumbers | optax.MaskedNode:
        dims = matrix_dims(axes)
        return MuonDimensionNumbers(*dims) if dims is not None and is_hidden_matrix(axes) else optax.MaskedNode()

    dimensions = map_axes(dimension_numbers, logical_axes)

    def scale(update: jax.Array, dims: MuonDimensionNumbers) -> jax.Array:
        sizes = [math.prod(update.shape[dim] for dim in part) for part in (dims.reduction_axis, dims.output_axis)]
        return update * (MUON_RMS * math.sqrt(max(sizes)))

    if bias_correction:
        directions = [scale_by_muon(beta=momentum, mu_dtype=jnp.float32, weight_dimension_numbers=dimensions)]
    else:
        # optax exports its orthogonalization only with a momentum. With decay 0, a new state for each update has no
        # effect, and XLA removes its zeros.
        orthogonal = scale_by_muon(beta=0.0, nesterov=False, weight_dimension_numbers=dimensions)
        directions = [
            optax.trace(momentum, nesterov=True, accumulator_dtype=jnp.float32),
            optax.stateless(lambda updates, params: orthogonal.update(updates, orthogonal.init(updates))[0]),
        ]
    return optax.chain(
        *directions,
        optax.stateless(lambda updates, params: jax.tree.map(scale, updates, dimensions)),
    )


# name -> a function that returns the direction, without weight decay and learning rate. Its parameters are the logical
# axes of the weights and the options that it reads.
DIRECTIONS: Mapping[str, Callable[..., optax.GradientTransformation]] = {
    "adamw": _adam,
    "adam": _adam,
    "sgd": _sgd,
    "lion": _lion,
    "adafactor": scale_by_adafactor,
    "muon": _muon,
}
NAMES = tuple(DIRECTIONS)
WITH_DECAY = tuple(name for name in NAMES if name != "adam")
WITH_MOMENTS = tuple(name for name in NAMES if name != "adafactor")


def _read(name: str) -> list[str]:
    """Returns the names of the options on which the update direction of a built-in optimizer depends.

    Args:
      name: the optimizer's name, a key of `DIRECTIONS`.
    """
    return list(inspect.signature(DIRECTIONS[name]).parameters)[1:]


def _readers(option: str) -> dict[str, tuple[str, ...]]:
    """Returns the condition under which an option has an effect: {"name": names of the optimizers that read it}.

    Args:
      option: the option's name, such as `beta1`; the result is the argument `only_for` of its definition.
    """
    return {"name": tuple(name for name in NAMES if option in _read(name))}


@dataclasses.dataclass(frozen=True)
class OptimizerOptions:
    """Options of the optimizer: its name and its hyperparameters."""

    name: str = option(
        "adamw",
        f"the optimizer: {', '.join(NAMES)}, or a custom {FORM}; adafactor's learning rate is relative to "
        "the size of each weight",
        choices=NAMES,
        names=WITH_OPTIONS,
    )
    beta1: float = option(
        0.9, "decay of the first moment (adamw, adam, lion, muon outside its matrices)", minimum=0.0,
        only_for=_readers("beta1"),
    )  # fmt: skip
    beta2: float = option(
        0.95,
        "decay of the second moment (adamw, adam, muon outside its matrices) or of lion's momentum (0.99 is usual)",
        minimum=0.0,
        only_for=_readers("beta2"),
    )
    epsilon: float = option(
        1e-8, "added to the root of the second moment (adamw, adam, muon outside its matrices)", minimum=0.0,
        only_for=_readers("epsilon"),
    )  # fmt: skip
    weight_decay: float = option(
        0.1,
        "decoupled weight decay of matrices and tables, times the learning rate; without effect on adam",
        minimum=0.0,
        only_for={"name": WITH_DECAY},
    )
    momentum: float = option(
        0.95, "decay of the momentum in sgd (0.9 is usual) and of muon's matrices", minimum=0.0,
        only_for=_readers("momentum"),
    )  # fmt: skip
    muon_bias_correction: bool = option(
        False,
        "muon divides momentum and gradient by 1 - momentum^t (as optax; unlike Jordan 2024 and PyTorch)",
        only_for=_readers("muon_bias_correction"),
    )
    moments: str = option(
        "float32",
        "how moments are stored: float32 (4 bytes each), bfloat16 (2) or 8bit (1, only matrices and tables)",
        choices=moments.KINDS,
        only_for={"name": WITH_MOMENTS},
    )
    moment_block: int = option(
        256, "elements of a matrix that share a scale, with 8-bit moments; a power of two",
        only_for={"moments": ("8bit",), "name": WITH_MOMENTS},
    )  # fmt: skip
    average: float = option(
        0.0,
        "decay of an average of the trained weights (0.999 is usual); evaluate, generate and hf export use it with "
        "--weights=average; 0: none",
        minimum=0.0,
    )
    balance_rate: float = option(
        0.001,
        "change of an expert's bias in each step, against its load, with model.moe.router=sigmoid",
        minimum=0.0,
        only_for={"model.moe.router": ("sigmoid",), "model.moe.num_experts": Except(0)},
    )
    clip_norm: float = option(1.0, "gradients are scaled down to this global norm; 0 means never", minimum=0.0)
    trainable: str = option(
        "",
        "regular expression; weights whose path matches are trained, others are frozen; '': all are trained (with "
        "lora.rank, only adapters)",
    )


def check(options: OptimizerOptions) -> list[Problem]:
    """Returns an error line for each invalid option of the optimizer; [] if all options are valid.

    The possible errors: a decay (`beta1`, `beta2`, `momentum` or `average`) is not below 1; `moment_block` is no power
    of two within its bounds; or `trainable` is no valid regular expression. The minimum and the choices of each option
    are checked by `options.problems`, not here.
    """
    above = [
        Problem(f"optimizer.{name}", got=getattr(options, name), allowed="at least 0 and below 1", nearest="0.999")
        for name in ("beta1", "beta2", "momentum", "average")
        if getattr(options, name) >= 1
    ]
    return above + moments.check_block(options.moment_block) + trainable.check(options.trainable)


def optimizer(options: OptimizerOptions, schedule: Schedule, logical_axes: NamesTree) -> optax.GradientTransformation:
    """Returns the optimizer, which computes from float32 gradients and parameters the updates to add to the parameters.

    With direction u and learning rate a, the update of a weight w is -a (u + weight_decay * w), in float32. The second
    term applies to weights for which `param_kinds.decays` is true, and never with "adam". A user's optimizer computes
    its complete update. The step, not the optimizer, applies `clip_norm` and `trainable`. The biases of routers get no
    update and have no moments, because `Task.after_update` changes them.

    >>> axes = {"kernel": ("embed", "mlp"), "bias": ("mlp",)}
    >>> adamw = optimizer(OptimizerOptions(weight_decay=0.5), lambda count: jnp.float32(0.01), axes)
    >>> params = {"kernel": jnp.ones((2, 3)), "bias": jnp.ones(3)}
    >>> updates, _ = adamw.update(jax.tree.map(jnp.zeros_like, params), adamw.init(params), params)
    >>> print(updates["kernel"][0, 0], jnp.any(updates["bias"]))  # 0.01 * 0.5 * the weight, matrices only
    -0.005 False

    Args:
      options: the optimizer's name and hyperparameters.
      schedule: the learning rate, a function of the number of updates done so far.
      logical_axes: a pytree with the structure of the parameters: a tuple of logical axes for each parameter.

    Returns:
      A transformation whose `update` requires the parameters. `options.moments` determines how moments are stored;
      moments of adafactor are float32. With `options.average` the optimizer's state is `average.Averaged`, and the step
      updates the averages.

    Raises:
      UserError: options are out of bounds, one line each; or a user's function is invalid, one line. The `init` of a
        user's optimizer may also raise it.
    """
    refuse(problems(options, "optimizer") + check(options))
    labels = map_axes(lambda axes: "biases" if is_router_bias(axes) else "others", logical_axes)
    logical_axes = map_axes(lambda axes: optax.MaskedNode() if is_router_bias(axes) else axes, logical_axes)
    make = _build_direction if options.name in NAMES else _user_optimizer
    moved = make(options, schedule, logical_axes)
    if "biases" in jax.tree.leaves(labels):
        moved = optax.partition({"biases": optax.set_to_zero(), "others": moved}, labels)
    return with_averages(moved) if options.average else moved


def _build_direction(options: OptimizerOptions, rates: Schedule, axes: NamesTree) -> optax.GradientTransformation:
    direction = DIRECTIONS[options.name](axes, **{name: getattr(options, name) for name in _read(options.name)})
    if options.name in WITH_MOMENTS:
        direction = moments.store_moments(direction, options.moments, options.moment_block, axes)
    weight_decay = options.weight_decay if options.name in WITH_DECAY else 0.0
    return optax.chain(
        direction,
        optax.add_decayed_weights(weight_decay, decays(axes)),
        optax.scale_by_learning_rate(rates),
    )


def _user_optimizer(options: OptimizerOptions, rates: Schedule, axes: NamesTree) -> optax.GradientTransformation:
    """Returns the optimizer that a user's function returns, with PRNG keys in its state replaced by their data.

    The optimizer's `init` traces an update and raises UserError if the update is invalid.

    Args:
      options: the optimizer's options; the name is the user's function.
      rates: the learning rate, a function of the number of updates done so far.
      axes: a pytree with the structure of the parameters: a tuple of logical axes for each parameter.

    Raises:
      UserError: the function fails, or does not return an optax transformation.
    """
    takes, wanted = "options, learning rates and logical axes", "an optax.GradientTransformation"
    fix = "correct the function"
    given = call_user_function(KEY, options.name, NAMES, [options, rates, axes], takes=takes, gives=wanted, fix=fix)
    if not isinstance(given, optax.GradientTransformation):
        raise UserError(
            Problem(
                KEY,
                got=f"'{options.name}', which returns {type(given).__name__}",
                allowed=wanted,
                nearest="optax.chain(...)",
            )
        )

    # Checkpoints and shardings support only arrays of numbers.
    is_key = lambda leaf: jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)  # noqa: E731
    as_data = lambda tree: jax.tree.map(lambda leaf: jax.random.key_data(leaf) if is_key(leaf) else leaf, tree)  # noqa: E731

    def first_update(params: Arrays) -> tuple[Arrays, Arrays, Arrays, Arrays]:
        state = given.init(params)
        updates, after = given.update(params, state, params)
        return params, state, updates, after

    def init(params: Arrays) -> Arrays:
        with wrap_user_errors(Problem(KEY, got=f"'{options.name}', whose init or update", allowed=wanted, nearest=fix)):
            like, state, updates, after = jax.eval_shape(first_update, params)
        if wrong := _unlike(updates, like) or _unlike(after, state):
            raise UserError(
                Problem(
                    KEY,
                    got=f"'{options.name}', whose update returns {wrong}",
                    allowed=(
                        "updates with the structure, shapes and dtypes of the weights, and a state with those from init"
                    ),
                    nearest="correct the function",
                )
            )
        return as_data(given.init(params))

    def update(gradients: Arrays, state: Arrays, params: Arrays) -> tuple[Arrays, Arrays]:
        keys = jax.eval_shape(given.init, params)
        typed = lambda leaf, like: jax.random.wrap_key_data(leaf) if is_key(like) else leaf  # noqa: E731
        updates, after = given.update(gradients, jax.tree.map(typed, state, keys), params)
        return updates, as_data(after)

    return optax.GradientTransformation(init, update)


def storage_problems(options: OptimizerOptions, num_layers: int, shape: tuple[int, ...]) -> list[Problem]:
    """Returns an error line if a user's optimizer may compute other updates because of how layers are stored, else [].

    A pipeline may store L layers in another shape than [L, ...]. The updates of an optimizer that is not elementwise
    would depend on this shape. So the optimizer must be marked as elementwise, or the shape must be [L, ...].

    Args:
      options: the optimizer's options.
      num_layers: the number of layers L.
      shape: the leading dims of stacked layers in memory (`pipeline.stages.Stack.shape`).
    """
    if options.name in NAMES or shape == (num_layers,):
        return []
    function = import_function(KEY, options.name, NAMES)
    if getattr(function, "elementwise", False):
        return []
    mark = f"{options.name.partition(':')[2]}.elementwise = True"
    return [
        Problem(
            KEY,
            got=(
                f"'{options.name}', but this pipeline stores {num_layers} layers as {list(shape)}, in chunks "
                "or with padding layers"
            ),
            allowed=(
                f"layers that are stored as [{num_layers}], or an elementwise optimizer (each element depends "
                f"only on its own gradient and state) with {mark}"
            ),
            nearest=f"{mark} if it is elementwise, else pipeline.num_chunks=1 with stages that divide the layers",
        )
    ]


def _unlike(tree: Arrays, like: Arrays) -> str:
    """Describes the first difference between two abstract pytrees in structure, shape or dtype; '' if there is none."""
    arrays, others = (
        {path: f"{leaf.dtype.name}{list(leaf.shape)}" for path, leaf in leaves_with_paths(one)} for one in (tree, like)
    )
    for path in others | arrays:
        got, wanted = (found[path] if path in found else "nothing" for found in (arrays, others))
        if got != wanted:
            return f"{got} for {path} instead of {wanted}"
    return ""
