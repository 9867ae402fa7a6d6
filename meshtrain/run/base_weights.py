"""Loads the starting weights of a new run from `init_from`, which names another run or a Hugging Face folder."""

import shlex
from pathlib import Path

import jax
from jax.sharding import NamedSharding, PartitionSpec

from meshtrain.assembly.assemble import Assembly
from meshtrain.errors import Problem, UserError, warn
from meshtrain.hf import adapters
from meshtrain.hf.folder import by_name, read_by_name
from meshtrain.launch import peers
from meshtrain.models import lora
from meshtrain.models.layers import A
from meshtrain.models.task import Params
from meshtrain.run import weights, workdir
from meshtrain.sharding.param_sharding import params_with_axes
from meshtrain.sharding.trainable import is_adapter, is_frozen
from meshtrain.sharding.trees import leaves_with_paths, select
from meshtrain.step.shardings import shardings


def refuse_other_weights(assembly: Assembly, run: Path) -> None:
    """Checks that the weights of `init_from` fit the run's model, before anything is written.

    Does nothing without `init_from`, or if the run resumes from its own checkpoint. If several matrices of a peft
    folder share one factor `lora_A`, this run trains a separate copy of it for each matrix; a warning then names the
    matrices.

    Args:
      assembly: the run's assembly.
      run: the run's folder.

    Raises:
      UserError: shapes or dtypes differ, the adapters' options differ from `lora`, or processes see different files.
    """
    config = assembly.config
    if not config.init_from or workdir.newest_step(run, config.checkpoint.directory):
        return
    base, found = weights.base_weights(config)
    params, rounded = _loadable_params(assembly, base, found)
    if peers.count() > 1:  # each process may read a separate copy
        peers.refuse_differences("init_from", weights.content(config), peers.SAME_FILES)
    if weights.is_by_name(config, base):
        by_name(base, params)
    else:
        weights.refuse_other_params(base, params, rounded)
    if found is None:
        return
    theirs, factors = adapters.factors(found, base, config.model)
    own = {path.removesuffix(A) for path, _ in leaves_with_paths(assembly.states.kept.params) if path.endswith(A)}
    wanted = {key: value for key, value in vars(theirs).items() if value != getattr(config.lora, key)}
    wanted = {key: value for key, value in wanted.items() if key != "targets" or own != factors.keys()}
    if config.lora.rank and wanted:
        fix = " ".join(shlex.quote(f"--config.lora.{key}={value}") for key, value in wanted.items())
        raise UserError(
            Problem(
                "init_from",
                got="adapters that differ from the options in lora",
                allowed="equal options, or lora.rank=0, which merges them",
                nearest=fix,
            )
        )
    if config.lora.rank and peers.is_main_process():
        for paths in adapters.split_factors(factors):
            together = f"{', '.join(paths)} share a lora_A"
            effect = "its losses differ from peft's after the first step; lora.rank=0 merges the adapters"
            warn(
                f"{config.init_from}: {together}, but this run trains a separate copy for each, a different "
                f"parametrization: {effect}"
            )


def read(assembly: Assembly) -> Params:
    """Returns the weights of `init_from`, with None for each weight that `init_from` does not contain.

    Stacked layers are in layer order, before they are regrouped for pipeline stages.

    Raises:
      UserError: the weights differ from the model's weights in shapes or dtypes.
    """
    base, found = weights.base_weights(assembly.config)
    params, rounded = _loadable_params(assembly, base, found)
    is_by_name = weights.is_by_name(assembly.config, base)
    kept = read_by_name(base, params) if is_by_name else weights.restore_params(base, None, params, rounded)[0]
    return kept if found is None else _with_adapters(assembly, base, found, kept)


def _loadable_params(assembly: Assembly, base: str, found: adapters.Adapters | None) -> tuple[Params, list[str]]:
    """Returns the abstract parameters to load from `init_from`, and the tree paths of parameters to cast.

    The parameters are `assembly.states.kept.params`, with None for each parameter that is not loaded from `base`. If
    the run has adapters or a `Task.begin`, `base` may lack two kinds of parameters. Missing adapters start from their
    initial values. Missing parameters below the name `frozen`, such as a copy of the initial weights, are computed by
    `Task.begin` from the loaded weights. A kind is not loaded if `base` contains no parameter of this kind. Neither
    kind is loaded from a Hugging Face folder if the task is not a decoder, or from the base model of a peft folder. The
    adapters of a peft folder are read separately, by `_with_adapters`.

    If `precision.frozen_dtype` is a dtype, the second result lists all frozen parameters. Their dtype in the files may
    differ; they are cast to this dtype when they are read. If `precision.frozen_dtype` is `auto`, the list is empty.

    Args:
      assembly: the run's assembly.
      base: the path of the starting weights, from `weights.base_weights`: `init_from`, or the base model of a peft
        folder.
      found: the adapters of a peft folder, from `weights.base_weights`; None if `init_from` is not a peft folder.
    """
    params, config = assembly.states.kept.params, assembly.config
    if config.lora.rank or assembly.task.begin is not None:
        is_bare = bool(found) or weights.is_by_name(config, base)
        missing = [kind for kind in (is_adapter, is_frozen) if is_bare or not any(map(kind, weights.paths(base)))]
        own = [not any(kind(path) for kind in missing) for path, _ in leaves_with_paths(params)]
        params = select(params, jax.tree.unflatten(jax.tree.structure(params), own))[0]
    if config.precision.frozen_dtype == "auto":
        return params, []
    return params, [path for path, is_trained in leaves_with_paths(assembly.placed.replicas.trained) if not is_trained]


def _with_adapters(assembly: Assembly, base: str, found: adapters.Adapters, kept: Params) -> Params:
    """Returns the base weights combined with the adapters of a peft folder.

    The adapters become parameters next to the base weights. If the run has no adapters (`lora.rank` is 0), they are
    merged into the base weights instead.

    Args:
      assembly: the run's assembly.
      base: the path of the base model.
      found: the opened peft folder.
      kept: the weights of the base model, with None for each adapter. Stacked layers are in layer order, not grouped by
        pipeline stage.
    """
    options, given = adapters.factors(found, base, assembly.config.model)
    like = whole = assembly.states.kept.params
    if not assembly.config.lora.rank:
        everywhere = NamedSharding(assembly.mesh, PartitionSpec())
        shapes, _ = params_with_axes(lora.initializer(assembly.task.init, options))
        whole = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=everywhere), shapes)
    leaves = dict(leaves_with_paths(kept)) | adapters.read(given, dict(leaves_with_paths(whole)))
    params = jax.tree.unflatten(jax.tree.structure(whole), [leaves[path] for path, _ in leaves_with_paths(whole)])

    def merge(params: Params) -> Params:
        return jax.tree.map(lambda weight, of: weight.astype(of.dtype), lora.merge_adapters(params, options), like)

    return params if assembly.config.lora.rank else jax.jit(merge, out_shardings=shardings(like))(params)
