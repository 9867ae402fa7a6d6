"""The functions of a task from a Flax NNX module: its initial weights, and its outputs for a batch.

A task's functions must give the same numbers on every mesh and with any number of microbatches. A module's random
streams are therefore replaced: the module is mapped over the sequences of a batch, and each sequence gets streams that
are derived from its own key (`task.sequence_keys`). The module may have no state that a step would change, because a
task's parameters are its only arrays.
"""

import dataclasses
import fnmatch
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from flax import nnx

from meshtrain.errors import Problem, UserError, nearest, refuse
from meshtrain.models.task import Params
from meshtrain.sharding.named import Named, unbox, value_and_names
from meshtrain.sharding.param_sharding import Names, is_names
from meshtrain.sharding.placement import Placement
from meshtrain.sharding.trees import Arrays

Path: TypeAlias = tuple[Any, ...]  # attributes and indices that lead to an array of a module
Variables: TypeAlias = Any  # path -> `nnx.Variable`
Make = Callable[[nnx.Rngs], Callable[..., Any]]
Init = Callable[[jax.Array], Params]
Apply = Callable[..., Arrays]


def from_nnx(
    make: Make, names: Mapping[str, Names] | None = None, placement: Placement | None = None
) -> tuple[Init, Apply]:
    """Returns the functions `init` and `apply` of an NNX module, to build a `Task` from them.

    `init(rng)` is a `Task.init`: it returns the module's weights as nested dicts of `Named`, below the names of the
    module's attributes. `rng` is a random key.

    `apply(params, keys, train, *inputs)` returns the module's outputs for a batch:
      params: weights with the structure of `init`, with or without boxes, in any dtype.
      keys: a random key for each sequence, [b], from `sequence_keys(rng, batch)`; None is enough for a module without
        random streams, and for `train=False`.
      train: whether dropout is active: the module is set to `train()` or `eval()`.
      *inputs: pytrees of arrays [b, ...], the arguments of the module. The module gets one example at a time, with a
        first dim of 1, and its outputs need this dim too.

    No device memory is used until `init` runs.

    >>> from flax import nnx
    >>> init, apply = from_nnx(lambda rngs: nnx.Linear(4, 8, rngs=rngs), {"kernel": ("embed", "mlp"), "bias": ("mlp",)})
    >>> {name: weight.names for name, weight in init(jax.random.key(0)).items()}
    {'bias': ('mlp',), 'kernel': ('embed', 'mlp')}

    Args:
      make: a function of `nnx.Rngs` that returns the module.
      names: logical axes for the weights that state none themselves: a pattern of the weight's path, such as
        `*/norm/*` -> a name or None for each dim. `*` also matches `/`; the first pattern that matches is used. A
        weight states its logical axes as metadata `axes`, or by `nnx.with_partitioning`. None: no patterns.
      placement: the argument of the task function, with which `apply` gathers weights over `fsdp` before their use; it
        gathers them in the dtype of `params`. None: XLA's partitioner decides whether it moves weights or activations.

    Raises:
      UserError: has a line for each weight without logical axes, for each pattern that names no weight, and for each
        array of the module that is neither a weight nor a random stream. `apply` raises it if `keys` is None and the
        module needs keys.
    """
    module = _Module.of(make, names or {})
    return module.init, dataclasses.replace(module, placement=placement or Placement.single_device()).apply


@dataclasses.dataclass(frozen=True, eq=False)  # compared by identity: JAX caches traces of its methods
class _Module:
    """The parts of an NNX module, without the values of its arrays.

    Attributes:
      make: a function of `nnx.Rngs` that returns the module.
      graph: the structure of the module.
      weights: path -> variable with an abstract value, for each `nnx.Param`.
      axes: the logical axes of each weight, with the structure of `init`.
      streams: path -> variable with an abstract value, for each key and each counter of the random streams.
      placement: gathers the weights.
    """

    make: Make
    graph: Any
    weights: Variables
    axes: Any
    streams: Variables
    placement: Placement

    @classmethod
    def of(cls, make: Make, patterns: Mapping[str, Names]) -> "_Module":
        """Returns the parts of the module that `make` returns; raises UserError as `from_nnx` does."""
        graphs, constants = list[Any](), list[Path]()

        def states() -> list[nnx.State]:
            module = _made(make, nnx.Rngs(0))
            # The value of an array that `jnp` computes in `__init__` is a tracer here, and no part of a state.
            constants.extend(path for path, value in nnx.iter_graph(module) if isinstance(value, jax.core.Tracer))
            graph, *states = nnx.split(module, nnx.Param, nnx.RngState, ...)
            graphs.append(graph)
            return states

        weights, streams, others = (dict(nnx.to_flat_state(state)) for state in jax.eval_shape(states))
        axes, problems = _axes(weights, patterns)
        problems += [_array_problem(path, leaf) for path, leaf in others.items()]
        refuse(problems + [_array_problem(path, None) for path in constants])
        return cls(make, graphs[-1], weights, _nested(axes), streams, Placement.single_device())

    def init(self, rng: jax.Array) -> Params:
        """Returns the initial weights with their logical axes."""
        values = dict(nnx.to_flat_state(nnx.state(_made(self.make, nnx.Rngs(rng)), nnx.Param)))
        nested = _nested({path: variable.get_value() for path, variable in values.items()})
        return jax.tree.map(Named, nested, self.axes)

    def apply(self, params: Params, keys: jax.Array | None, train: bool, *inputs: Arrays) -> Arrays:
        """Returns the module's outputs for a batch, as described in `from_nnx`."""
        if keys is None and train and self.streams:
            streams = " and ".join(sorted({_text(path[:-1]) for path in self.streams}))
            raise UserError(
                Problem(
                    "keys",
                    got=f"None with train=True, and the module has the random streams {streams}",
                    allowed="a random key for each sequence",
                    nearest="sequence_keys(rng, batch)",
                )
            )
        gathered = jax.tree.map(self.placement.weight, unbox(params), self.axes)

        def one(key: jax.Array, *example: Arrays) -> Arrays:
            module = nnx.merge(self.graph, self._with_values(gathered), self._seeded(key))
            if train:
                module.train()
            else:
                module.eval()
            outputs = module(*jax.tree.map(lambda x: x[None], example))
            return jax.tree.map(lambda y: y[0], outputs)

        if keys is None:
            return jax.vmap(lambda *example: one(jax.random.key(0), *example))(*inputs)
        return jax.vmap(one)(keys, *inputs)

    def _with_values(self, params: Params) -> nnx.State:
        """Returns the state of the weights with the values of `params`."""
        filled = []
        for path, variable in self.weights.items():
            value = params
            for key in path:
                value = value[str(key)]
            filled.append((path, variable.replace(value)))
        return nnx.from_flat_state(filled)

    def _seeded(self, key: jax.Array) -> nnx.State:
        """Returns the state of the random streams at their start, each with its own key derived from `key`."""
        seeded = []
        for index, (path, variable) in enumerate(self.streams.items()):
            like = variable.get_value()
            if jnp.issubdtype(like.dtype, jax.dtypes.prng_key):
                stream_key = jax.random.fold_in(key, index)
                # A stack of modules, created by `nnx.vmap`, has a stack of keys.
                value = jax.random.split(stream_key, like.shape) if like.shape else stream_key
            else:
                value = jnp.zeros(like.shape, like.dtype)  # the number of draws so far
            seeded.append((path, variable.replace(value)))
        return nnx.from_flat_state(seeded)


def _made(make: Make, rngs: nnx.Rngs) -> Any:
    """Returns the module that `make` creates; `nnx.with_partitioning` would otherwise require a mesh in context."""
    with nnx.use_eager_sharding(False):
        module = make(rngs)
    if not isinstance(module, nnx.Module):
        line = Problem("make", got=type(module).__name__, allowed="an nnx.Module", nearest="lambda rngs: Model(rngs)")
        raise UserError(line)
    return module


def _axes(weights: Variables, patterns: Mapping[str, Names]) -> tuple[dict[Path, Names], list[Problem]]:
    """Returns the logical axes of each weight, and an error line for each weight and each pattern without a partner.

    Args:
      weights: path -> variable with an abstract value.
      patterns: pattern of a path -> logical axes, for weights that state none.
    """
    axes, problems, unnamed = dict[Path, Names](), list[Problem](), list[str]()
    used = set[str]()
    for path, variable in weights.items():
        at, (value, stated) = _text(path), value_and_names(variable)
        if stated is None:
            unnamed.append(at)
            pattern = next((pattern for pattern in patterns if fnmatch.fnmatchcase(at, pattern)), None)
            if pattern is not None:
                used.add(pattern)
                stated = patterns[pattern]
        axes[path] = stated
        if stated is None or not is_names(stated) or len(stated) != value.ndim:
            problems.append(
                Problem(
                    f"{at}: shape {value.shape}",
                    got="no logical axes" if stated is None else f"{stated!r} as logical axes",
                    allowed="a name or None for each dim",
                    nearest=f"names={{'{at}': {(None,) * value.ndim}}}",
                )
            )
    for pattern in patterns:
        if pattern not in used:
            problems.append(
                Problem(
                    "names",
                    got=f"the pattern '{pattern}', which is not used for any weight",
                    allowed="a pattern of the path of a weight that states no logical axes",
                    fix=nearest(pattern, unnamed),
                )
            )
    return axes, problems


def _array_problem(path: Path, leaf: Any) -> Problem:
    """Returns the error line for an array of a module that is neither a weight nor a random stream.

    Args:
      path: path of the array in the module.
      leaf: the variable that contains the array, or None if no variable contains it.
    """
    got, fix = "an array that is not an nnx.Param", "compute it in __call__"
    if isinstance(leaf, nnx.Variable):
        got = f"a {type(leaf).__name__}, which a step would change"
        if isinstance(leaf, nnx.BatchStat):
            fix = "nnx.LayerNorm, nnx.RMSNorm or nnx.GroupNorm in place of nnx.BatchNorm"
    return Problem(_text(path), got=got, allowed="nnx.Param and random streams", nearest=fix)


def _nested(flat: Mapping[Path, Any]) -> dict[str, Any]:
    """Returns nested dicts with strings as keys: `{("up", 0): w}` becomes `{"up": {"0": w}}`."""
    tree: dict[str, Any] = {}
    for path, value in flat.items():
        node = tree
        for key in path[:-1]:
            node = node.setdefault(str(key), {})
        node[str(path[-1])] = value
    return tree


def _text(path: Path) -> str:
    return "/".join(map(str, path))
