"""What crosses data as a configuration says: gradients, by a reduction with a name, or weights of groups apart.

A reduction's function is (options, dtype) -> `Reduction`: see `sharding/reduction.py`.
"""

import dataclasses
from collections.abc import Mapping

from meshtrain.config.fields import Config
from meshtrain.errors import Problem, UserError
from meshtrain.options import Imported, called, imported_function, own_check, side_names
from meshtrain.sharding.reduction import KEY as KEY
from meshtrain.sharding.reduction import MAX_LEVEL, NAMES, SUM, Reduction
from meshtrain.sharding.rules import DATA
from meshtrain.step.precision import reduce_dtype

PERIOD = "local_steps.period"


def of(config: Config) -> Reduction | None:
    """Returns the reduction of a configuration; None for the built-in sum.

    Raises:
      UserError: one line: there is no such function, it raises, or returns something else.
    """
    name = config.reduction.name
    if name == SUM:
        return None
    made = called(
        KEY,
        name,
        NAMES,
        [config.reduction, reduce_dtype(config.precision)],
        takes="options and a dtype",
        gives="a function (options, dtype) -> Reduction",
        fix=f"mend it there, or {KEY}={SUM}",
    )
    if not isinstance(made, Reduction):
        raise UserError(
            Problem(
                KEY,
                got=f"'{name}', which returns {type(made).__name__}",
                allowed="a Reduction",
                nearest="return Reduction(reduce, sent_bytes)",
            )
        )
    return dataclasses.replace(made, name=name)


def problems(config: Config, mesh_shape: Mapping[str, int]) -> list[Problem]:
    """Returns one line for each reason why gradients cannot be reduced, or groups train apart, as a configuration says.

    Args:
      config: with the options of the reduction that it names.
      mesh_shape: the size of each mesh axis.
    """
    try:
        make_apart, reduction = apart(config), of(config)
    except UserError as error:
        return list(error.problems)
    lines = list(make_apart.check(config, mesh_shape)) if make_apart else []
    if reduction is None:
        return lines
    function = imported_function(KEY, reduction.name, NAMES)
    lines += own_check(KEY, reduction.name, function, (config, mesh_shape))
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


def apart(config: Config) -> Imported:
    """Returns (configuration, replicas, placement, logical axes of the batch) -> `Apart`; None without a period.

    Raises:
      UserError: one line: the side room's folder is not there.
    """
    period = config.local_steps.period
    if period and not side_names(PERIOD):
        raise UserError(Problem(PERIOD, got=period, allowed="0, as meshtrain/lab is not here", nearest=0))
    return imported_function(PERIOD, "apart", ()) if period else None
