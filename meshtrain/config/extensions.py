"""Creates the gradient reduction, and the extension for separately trained groups, that a configuration chooses.

A function (options, dtype) -> `Reduction` creates the reduction; see `sharding/reduction.py`. The extension trains
groups of replicas separately (local SGD, DiLoCo); see `step/extension.py`.
"""

import dataclasses
from collections.abc import Mapping

import jax

from meshtrain.config.schema import Config
from meshtrain.errors import Problem, UserError
from meshtrain.sharding.gradients import OverData
from meshtrain.sharding.reduction import KEY as KEY
from meshtrain.sharding.reduction import MAX_LEVEL, NAMES, SUM, Reduction
from meshtrain.sharding.rules import DATA
from meshtrain.sharding.trees import Arrays
from meshtrain.step.extension import Estimate
from meshtrain.step.precision import reduce_dtype
from meshtrain.user_functions import UserObject, call_user_function, import_function, plugin_names, user_check

PERIOD = "local_steps.period"
FLOAT32_BYTES = 4


def of(config: Config) -> Reduction | None:
    """Returns the gradient reduction that a configuration names; None for the built-in sum.

    Raises:
      UserError: there is no such function, it raises, or it does not return a `Reduction`.
    """
    name = config.reduction.name
    if name == SUM:
        return None
    made = call_user_function(
        KEY,
        name,
        NAMES,
        [config.reduction, reduce_dtype(config.precision)],
        takes="options and a dtype",
        gives="a function (options, dtype) -> Reduction",
        fix=f"correct the function, or use {KEY}={SUM}",
    )
    if not isinstance(made, Reduction):
        raise UserError(
            Problem(
                KEY,
                got=f"'{name}', which returns {type(made).__name__}",
                allowed="a Reduction",
                nearest="return Reduction(update, sent_bytes)",
            )
        )
    return dataclasses.replace(made, name=name)


def crossing(config: Config) -> OverData:
    """Returns how a step combines the gradients of the data-parallel replicas.

    The result is SUMMED for the built-in sum, and STACKED for any other reduction, which gets the gradients as an array
    [replicas, ...]. It is INSIDE for separate groups (local SGD): each replica uses its own gradients.
    """
    if config.local_steps.period:
        return OverData.INSIDE
    return OverData.SUMMED if config.reduction.name == SUM else OverData.STACKED


def problems(config: Config, mesh_shape: Mapping[str, int]) -> list[Problem]:
    """Returns an error line for each problem of the configured gradient reduction, or of training separate groups.

    Args:
      config: the configuration; `reduction` selects the reduction, `local_steps` the separate groups.
      mesh_shape: the size of each mesh axis.
    """
    try:
        make, reduction = make_extension(config), of(config)
    except UserError as error:
        return list(error.problems)
    lines = list(make.check(config, mesh_shape)) if make else []
    if reduction is None:
        return lines
    function = import_function(KEY, reduction.name, NAMES)
    lines += user_check(KEY, reduction.name, function, (config, mesh_shape))
    level = config.zero.effective_level
    if level > MAX_LEVEL and mesh_shape[DATA] > 1:
        lines.append(
            Problem(
                KEY,
                got=f"{reduction.name} with zero.level={level}, which reduces the gradients of each microbatch",
                allowed=f"zero.level 0 or {MAX_LEVEL}",
                nearest=f"zero.level={MAX_LEVEL}",
                depends_on=["zero.level"],
            )
        )
    return lines


def unread(config: Config) -> dict[str, str]:
    """Returns dotted key -> reason for each option that the gradient reduction or the separate groups ignore.

    The reason is the setting that makes the option unused, such as `reduction.name=int8` or `local_steps.period=10`.
    """
    make, reduction = make_extension(config), of(config)
    reasons = dict.fromkeys(reduction.unread, f"{KEY}={reduction.name}") if reduction else {}
    return reasons | (dict.fromkeys(make.unread, f"{PERIOD}={config.local_steps.period}") if make else {})


def make_extension(config: Config) -> UserObject:
    """Returns the function that creates the extension for separate groups; None if `local_steps.period` is 0.

    The function is (configuration, task on its mesh, reduction) -> `Extension`. It has three attributes. `check` is a
    function (config, mesh_shape) -> a list of problems. `estimate` is a function (config, mesh_shape) -> `Estimate`.
    `unread` lists the dotted keys of options that the extension ignores.

    Raises:
      UserError: the folder `meshtrain/lab` is not there.
    """
    period = config.local_steps.period
    names = plugin_names(PERIOD)
    if period and not names:
        raise UserError(
            Problem(PERIOD, got=period, allowed="0, because the folder meshtrain/lab is missing", nearest=0)
        )
    return import_function(PERIOD, names[0], ()) if period else None


def estimate(config: Config, mesh_shape: Mapping[str, int], params: Arrays = ()) -> Estimate:
    """Returns the memory and traffic that the gradient reduction and separate groups add, estimated without compiling.

    The gradient reduction is the method that `reduction.name` selects. Groups train separately with `local_steps`.

    Args:
      config: a configuration that is valid on this mesh.
      mesh_shape: the size of each mesh axis.
      params: abstract parameters, from which the arrays that the gradient reduction saves between steps are determined;
        (): these arrays are not included.
    """
    make, reduction = make_extension(config), of(config)
    result: Estimate = make.estimate(config, mesh_shape) if make else Estimate()
    if reduction is None:
        return result
    level = config.zero.effective_level
    sent = reduction.sent_bytes(1, mesh_shape[DATA], bool(level)) + (FLOAT32_BYTES if level else 0)
    keeps = bool(jax.tree.leaves(reduction.init(params)))
    return result._replace(
        float32=result.float32 + keeps, sent_bytes=sent if result.sent_bytes is None else result.sent_bytes
    )
