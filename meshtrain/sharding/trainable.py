"""Selects the trained weights: those whose path matches a regular expression. Other weights are frozen.

A frozen weight takes part in the forward pass, but has neither a gradient nor moments. Adapters (`models/lora.py`) are
always trained. In a model with adapters, an empty expression matches no other weight; in other models it matches all
weights. A task's weights below the name `frozen` are never trained.
"""

import difflib
import re

import jax

from meshtrain.errors import Problem, UserError
from meshtrain.sharding.trees import Arrays, Masks, leaves_with_paths

OPTION = "optimizer.trainable"
# Suffixes of the names of an adapter's two factors.
ADAPTER_ENDS = ("_lora_a", "_lora_b")
FROZEN = "frozen"  # in a path: weights that are never trained


def is_adapter(path: str) -> bool:
    """Returns whether the weight with this path is a factor of an adapter."""
    return path.endswith(ADAPTER_ENDS)


def is_frozen(path: str) -> bool:
    """Returns whether the weight with this path is never trained, because a part of the path is `frozen`."""
    return FROZEN in path.split("/")


def check(pattern: str) -> list[Problem]:
    """Returns an error line if the pattern is not a valid regular expression, else []."""
    fix = re.sub(r"[^\w/]+", ".*", pattern)
    return [
        Problem(
            OPTION,
            got=f"'{pattern}' ({error})",
            allowed="a Python regular expression; '' for all weights",
            nearest=f"'{fix}'",
        )
        for error in pattern_errors(pattern)
    ]


def pattern_errors(pattern: str) -> list[str]:
    """Returns a list with Python's error message if the regular expression is invalid, else []."""
    try:
        re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        return [str(error)]
    return []


def trainable_mask(pattern: str, params: Arrays, *, has_adapters: bool = False) -> Masks:
    """Returns a pytree of bool with the structure of the parameters: True for each trained weight.

    The pattern is searched anywhere in a path (`re.search`): `query` matches `layers/attention/query`, and `^layers/`
    matches everything in the layers. Without adapters the empty pattern matches every path.

    >>> trainable_mask("up$", {"layers": {"up": 1.0, "down": 2.0}})
    {'layers': {'down': False, 'up': True}}

    Args:
      pattern: a valid regular expression.
      params: a pytree of arrays or `jax.ShapeDtypeStruct`s, the parameters.
      has_adapters: whether some parameters are adapters, which are always trained. The empty pattern then selects only
        them.

    Raises:
      UserError: no path matches; the line names the nearest path.
    """
    paths = [path for path, _ in leaves_with_paths(params)]
    matches = [re.search(pattern, path) is not None and not is_frozen(path) for path in paths]
    if paths and not any(matches):
        raise UserError(
            Problem(
                OPTION,
                got=f"'{pattern}', which matches none of {len(paths)} weights",
                allowed="a regular expression that matches a part of a weight's path; '' for all",
                nearest=f"'{nearest_path(pattern, paths)}'",
            )
        )
    if has_adapters:
        matches = [is_adapter(path) or (pattern != "" and found) for path, found in zip(paths, matches, strict=True)]
    return jax.tree.unflatten(jax.tree.structure(params), matches)


def nearest_path(pattern: str, paths: list[str]) -> str:
    """Returns the path that contains the part most similar to the pattern, for a suggestion in an error.

    A part is one name or several consecutive names of the path. Similarity is the ratio of `difflib`.
    """

    def likeness(path: str) -> float:
        names = path.split("/")
        parts = {"/".join(names[i:j]) for i in range(len(names)) for j in range(i + 1, len(names) + 1)}
        return max(difflib.SequenceMatcher(None, pattern, part).ratio() for part in parts)

    return max(paths, key=likeness)
