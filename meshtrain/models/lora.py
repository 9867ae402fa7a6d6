"""Low-rank adapters (Hu et al. 2021): x W becomes x W + (alpha / r) (x A) B, with W frozen and A and B trained.

Rank-stabilized adapters (Kalajdzievski 2023) use alpha / sqrt(r) instead.

A task of the decoder or of the encoder-decoder gets two additional weights for each selected matrix of its layers,
named after it (`query`, `query_lora_a`, `query_lora_b`). They have logical axes like any weight, so meshes, pipelines,
optimizers and checkpoints need no special support. `layers.multiply` applies them in the product.

r: rank. A [..., r] has the dims of W that the product sums over, B [r, ...] the other dims of W. Both are stacked over
layers like W.
"""

import dataclasses
import functools
import math
import re
import zlib
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from meshtrain.errors import Problem
from meshtrain.models.layers import A, B, factor_axes
from meshtrain.models.task import Params, Task
from meshtrain.options import Except, option
from meshtrain.sharding import trainable
from meshtrain.sharding.named import Named, is_boxed, value_and_names
from meshtrain.sharding.param_kinds import is_hidden_matrix, matrix_dims, num_stacked
from meshtrain.sharding.param_sharding import Names, is_names, params_with_axes
from meshtrain.sharding.trees import Arrays, NamesTree, leaves_with_paths

TARGETS = "lora.targets"


@dataclasses.dataclass(frozen=True)
class LoraOptions:
    """Low-rank adapters for the matrices of the layers."""

    rank: int = option(
        0,
        "rank of adapters; only they (and optimizer.trainable's weights) are trained; 0: no adapters",
        minimum=0,
    )
    alpha: float = option(
        16.0, "an adapter's output is multiplied by alpha / rank", minimum=0.0, only_for={"rank": Except(0)}
    )
    targets: str = option(
        "", "regular expression; matrices whose path matches get adapters; '': all of attention and mlp",
        only_for={"rank": Except(0)},
    )  # fmt: skip
    rank_stabilized: bool = option(
        False, "multiply by alpha / sqrt(rank) instead (rsLoRA)", only_for={"rank": Except(0)}
    )

    @property
    def scale(self) -> float:
        """The factor of an adapter's output, alpha / r or alpha / sqrt(r); requires a rank above 0."""
        return self.alpha / (math.sqrt(self.rank) if self.rank_stabilized else self.rank)


def with_adapters(task: Task, options: LoraOptions, share_of_experts: float = 1.0) -> Task:
    """Returns the task with adapters for the selected matrices; the unchanged task if the rank is 0.

    B starts at zero, so the first loss equals the loss without adapters. Other weights have the same initial values as
    without adapters.

    Args:
      task: a task whose modules call `layers.multiply`, such as the decoder and the encoder-decoder.
      options: adapter options for which `problems` returns no error line.
      share_of_experts: share of the experts that process a token, 0 to 1, for counting active adapter parameters.
    """
    if not options.rank:
        return task
    init, scale = initializer(task.init, options), options.scale
    params, axes = params_with_axes(init)
    names = dict(leaves_with_paths(axes, is_leaf=is_names))
    sizes = {path: leaf.size for path, leaf in leaves_with_paths(params) if trainable.is_adapter(path)}
    num_added, stages, decode = sum(sizes.values()), task.stages, task.decode
    num_active = sum(
        round(size * share_of_experts) if "experts" in names[path] else size for path, size in sizes.items()
    )
    if decode:
        decode = dataclasses.replace(decode, prefill=_scaling(decode.prefill, scale), step=_scaling(decode.step, scale))
    return dataclasses.replace(
        task,
        init=init,
        loss=_scaling(task.loss, scale),
        logits=task.logits and _scaling(task.logits, scale),
        stages=stages and dataclasses.replace(stages, repeated=_scaling(stages.repeated, scale)),
        decode=decode,
        flops_per_token=_flops_per_token(task, num_active),
        num_parameters=task.num_parameters + num_added,
        num_active_parameters=task.num_active_parameters and task.num_active_parameters + num_active,
    )


def _flops_per_token(task: Task, num_added: int) -> float:
    """Returns model FLOPs for one token of a task with adapters, forward and backward.

    A frozen weight takes 4 FLOPs instead of 6, because it has no gradient. A trained weight of an adapter takes 6.

    Args:
      task: the task without adapters.
      num_added: number of adapter parameters that process a token.
    """
    return (task.flops_per_token - task.attention_flops_per_token) * 4 / 6 + (
        task.attention_flops_per_token + 6.0 * num_added
    )


def _scaling(function: Callable[..., Arrays], scale: float) -> Callable[..., Arrays]:
    return lambda params, *given, **named: function(scale_adapters(params, scale), *given, **named)


def scale_adapters(params: Params, scale: float) -> Params:
    """Returns the parameters with each adapter's B multiplied by `scale`, in float32; other weights are unchanged.

    `layers.multiply` has no argument for the scale, so B is multiplied by the scale in advance.
    """

    def one(path: Sequence[jax.tree_util.DictKey], leaf: jax.Array) -> jax.Array:
        return leaf.astype(jnp.float32) * scale if path[-1].key.endswith(B) else leaf

    return jax.tree_util.tree_map_with_path(one, params)


@functools.cache
def initializer(init: Callable[[jax.Array], Params], options: LoraOptions) -> Callable[[jax.Array], Params]:
    """Returns a function like `Task.init` that also initializes the adapters.

    Returns the same function for equal arguments, because JAX caches traces by function.

    Args:
      init: `Task.init` of the task without adapters.
      options: adapter options, which select the matrices and the rank.
    """
    return functools.partial(_init, init, options)


def _init(init: Callable[[jax.Array], Params], options: LoraOptions, rng: jax.Array) -> Params:
    """Returns the weights of `init(rng)` unchanged, and the adapter factors, each boxed with its logical axes.

    `options` select the adapted matrices and the rank.
    """

    def extended(tree: Params, above: str) -> Params:
        result: dict[str, Params] = {}
        for name, part in tree.items():
            path = f"{above}{name}"
            if not is_boxed(part):
                result[name] = extended(part, f"{path}/")
                continue
            result[name] = part
            value, names = value_and_names(part)
            if _is_target(options, path, names):
                key = jax.random.fold_in(rng, zlib.crc32(path.encode()))
                factors = _factors(key, value.shape, names, options.rank)
                result |= {f"{name}{end}": factor for end, factor in factors.items()}
        return result

    return extended(init(rng), "")


def _is_target(options: LoraOptions, path: str, names: Names) -> bool:
    return is_hidden_matrix(names) and re.search(options.targets, path) is not None


def _factors(key: jax.Array, shape: Sequence[int], names: Names, rank: int) -> dict[str, Named]:
    """Returns the initial factors of one adapter, float32: suffix of the name -> array with its logical axes.

    A is uniform between -1 / sqrt(inputs) and 1 / sqrt(inputs), as in Hu et al.'s code; B is zeros.

    Args:
      key: random key for A.
      shape: shape of the adapted matrix.
      names: its logical axes.
      rank: r.
    """
    dims = matrix_dims(names)
    assert dims is not None, "only matrices are targets"
    stack, axes = shape[: num_stacked(names)], factor_axes(names)
    inputs, outputs = ([shape[dim] for dim in part] for part in dims)
    bound = 1 / math.sqrt(math.prod(inputs))
    a = jax.random.uniform(key, (*stack, *inputs, rank), jnp.float32, -bound, bound)
    b = jnp.zeros((*stack, rank, *outputs), jnp.float32)
    return {end: Named(x, names) for end, x, names in zip((A, B), (a, b), axes, strict=True)}


def merge_adapters(params: Params, options: LoraOptions) -> Params:
    """Merges adapters into weights: returns W + scale A B in float32, and other weights unchanged.

    Args:
      params: unboxed parameters with adapters; layers are in layer order or reshaped to pipeline chunks.
      options: adapter options with which the parameters were trained.
    """
    scale = options.scale if options.rank else 0.0

    def one(tree: Params) -> Params:
        result: dict[str, Params] = {}
        for name, part in tree.items():
            if isinstance(part, dict):
                result[name] = one(part)
            elif f"{name}{A}" in tree:
                result[name] = part.astype(jnp.float32) + scale * _product(tree[f"{name}{A}"], tree[f"{name}{B}"], part)
            elif not trainable.is_adapter(name):
                result[name] = part
        return result

    return one(params)


def _product(a: jax.Array, b: jax.Array, like: jax.Array) -> jax.Array:
    """Returns A B in float32 with the shape of the matrix `like`; leading dims that stack layers are batched."""
    stacked = tuple(range(a.ndim + b.ndim - like.ndim - 2))
    contracted = ((a.ndim - 1,), (len(stacked),))
    return jax.lax.dot_general(
        a.astype(jnp.float32), b.astype(jnp.float32), (contracted, (stacked, stacked)),
        precision=jax.lax.Precision.HIGHEST,
    )  # fmt: skip


def problems(options: LoraOptions, params: Params, axes: NamesTree) -> list[Problem]:
    """Returns an error line for each adapter option that does not fit the task's weights or has no effect.

    Args:
      options: the options to check; each field is within its bounds.
      params: abstract weights of the task without adapters.
      axes: logical axes of the weights.
    """
    names = dict(leaves_with_paths(axes, is_leaf=is_names))
    targets = [path for path in names if is_hidden_matrix(names[path])]
    fix = trainable.nearest_path(options.targets, targets)
    problem = Problem(
        TARGETS,
        got=f"'{options.targets}'",
        allowed=f"a regular expression that matches a part of one of the paths {', '.join(targets)}; '' for all",
        nearest=f"'{fix}'",
    )
    if errors := trainable.pattern_errors(options.targets):
        return [problem.with_parts(got=f"'{options.targets}' ({errors[0]})")]
    matched = [path for path in names if re.search(options.targets, path)]
    tables = [path for path in matched if matrix_dims(names[path]) is not None and path not in targets]
    if options.targets and tables:
        return [
            problem.with_parts(
                got=f"'{options.targets}', which matches {tables[0]}, but this is not a matrix of a layer"
            )
        ]
    chosen = [path for path in targets if path in matched]
    if not chosen:
        return [problem.with_parts(got=f"'{options.targets}', which matches no matrix of a layer")]
    shapes, problems = {path: leaf.shape for path, leaf in leaves_with_paths(params)}, list[Problem]()
    both = [
        [math.prod(shapes[path][dim] for dim in part) for part in matrix_dims(names[path]) or ()] for path in chosen
    ]
    largest = max(map(min, both))
    if options.rank > largest:
        problems.append(
            Problem(
                "lora.rank",
                got=options.rank,
                allowed=f"at most {largest}, the rank that a matrix with an adapter can have",
                nearest=largest,
            )
        )
    if not options.alpha:
        problems.append(
            Problem("lora.alpha", got="0.0, which disables the adapters", allowed="above 0", nearest="16.0")
        )
    return problems
