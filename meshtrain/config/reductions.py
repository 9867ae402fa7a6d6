"""Reductions over data by name: the built-in sum, those of side rooms, and any function of the user's.

The function is (options, dtype) -> `Reduction`: see `sharding/reduction.py`.
"""

import dataclasses
from collections.abc import Mapping

from meshtrain import options
from meshtrain.config import side_rooms
from meshtrain.config.fields import Config
from meshtrain.errors import UserError
from meshtrain.options import Imported, options_problem
from meshtrain.sharding.axes import DATA
from meshtrain.sharding.reduction import MAX_LEVEL, SUM, Reduction, ReductionOptions
from meshtrain.step.precision import reduce_dtype

KEY = "reduction.name"


def find(name: str) -> Imported:
    """Returns the function of a name, which is not that of the built-in sum.

    Raises:
      UserError: one line: see `named.function`, or its options are no frozen dataclass of `option`s.
    """
    if name in side_rooms.names(KEY):
        return side_rooms.found(KEY, name)
    function: Imported = options.imported_function(KEY, name, [SUM, *side_rooms.names(KEY)])
    if hasattr(function, "options"):
        line = options_problem(KEY, name, function.options)
        if not line and not issubclass(function.options, ReductionOptions):
            line = (
                f"{KEY}: got '{name}', whose options are {function.options.__name__}; allowed: a subclass of "
                f"ReductionOptions; nearest: class {function.options.__name__}(ReductionOptions)"
            )
        if line:
            raise UserError(line)
    return function


def options_of(name: str) -> ReductionOptions:
    """Returns the default options of the reduction of a name.

    Raises:
      UserError: see `find`.
    """
    function: Imported = None if name == SUM else find(name)
    options: type[ReductionOptions] = function.options if hasattr(function, "options") else ReductionOptions
    return options(name=name)


def of(config: Config) -> Reduction | None:
    """Returns the reduction of a configuration; None for the built-in sum.

    Raises:
      UserError: one line: see `find`; or the function raises, or returns something else.
    """
    name = config.reduction.name
    if name == SUM:
        return None
    function = find(name)
    try:
        made = function(config.reduction, reduce_dtype(config.precision))
    except UserError:
        raise
    except Exception as error:  # whatever the user's function raises
        raise UserError(
            f"{KEY}: got '{name}', which raises {options.raised(error)}; allowed: a function (options, dtype) -> "
            f"Reduction; nearest: mend it there, or {KEY}={SUM}"
        ) from error
    if not isinstance(made, Reduction):
        raise UserError(
            f"{KEY}: got '{name}', which returns {type(made).__name__}; allowed: a Reduction; nearest: return "
            "Reduction(reduce, sent_bytes)"
        )
    return dataclasses.replace(made, name=name)


def problems(config: Config, mesh_shape: Mapping[str, int]) -> list[str]:
    """Returns one line for each reason why gradients cannot be reduced as a configuration says.

    Args:
      config: with the options of the reduction that it names.
      mesh_shape: the size of each mesh axis.
    """
    try:
        if of(config) is None:
            return []
        function = find(config.reduction.name)
    except UserError as error:
        return list(error.problems)
    lines, level = list[str](), config.zero.effective_level
    if hasattr(function, "check"):
        lines += function.check(config, mesh_shape)
    if level > MAX_LEVEL and mesh_shape[DATA] > 1:
        lines.append(
            f"{KEY}: got {config.reduction.name} with zero.level={level}, which reduces the gradients of each "
            f"microbatch; allowed: zero.level 0 or {MAX_LEVEL}; nearest: zero.level={MAX_LEVEL}"
        )
    return lines
