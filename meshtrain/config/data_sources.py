"""Selects the data source that a configuration names: a source of meshtrain or an optional package, or a function."""

import dataclasses
import functools
import typing
from collections.abc import Iterable

from meshtrain.data.corpus import SOURCES
from meshtrain.data.sources import DataOptions, Source, fraction_problems, is_own
from meshtrain.data.tokenizer import NUM_BYTES
from meshtrain.errors import Problem, UserError, nearest
from meshtrain.options import OptionsClass, Value
from meshtrain.user_functions import FORM, function_problems, import_function, plugin_names

KEY = "data.source"


def names() -> list[str]:
    """Returns the names of the built-in data sources, including sources of installed optional packages."""
    return [*SOURCES, *plugin_names(KEY)]


def find(name: str) -> Source:
    """Returns the built-in data source with this name."""
    return SOURCES[name] if name in SOURCES else typing.cast(Source, import_function(KEY, name, names()))


def options_of(name: str, given: Iterable[str] = ()) -> type[DataOptions]:
    """Returns the class of the options in `data`, for a data source.

    The class has the options of this source. If the configuration also sets options of another built-in source, the
    class has the options of all built-in sources, so that users can change the source in one line.

    Args:
      name: the name of the source. A user's function, or an unknown name, has only the options that all sources share.
      given: the names of the options in `data` that a configuration sets.
    """
    own: OptionsClass = find(name).options if name in names() else DataOptions
    return own if set(given) <= {field.name for field in dataclasses.fields(own)} else _with_others(own)


@functools.cache
def _with_others(own: OptionsClass) -> type[DataOptions]:
    held, more = {field.name for field in dataclasses.fields(own)}, dict[str, tuple[str, type, Value]]()
    for other in (find(one).options for one in names()):
        kinds = typing.get_type_hints(other)
        for field in dataclasses.fields(other):
            if field.name not in held:
                copy = dataclasses.field(default=field.default, metadata=field.metadata)
                more[field.name] = (field.name, kinds[field.name], copy)
    return dataclasses.make_dataclass(own.__name__, more.values(), bases=(own,), frozen=True) if more else own


def check(options: DataOptions, *, reads_data: bool = True) -> list[Problem]:
    """Returns an error line for each problem with the data options that is visible without reading the data.

    Paths, sizes and descriptions of files are checked. For a user's data function, which may read any input, only its
    name and the validation fraction are checked.

    Args:
      options: the options of `data`; each value must be within its bounds.
      reads_data: whether the files must exist on this machine; if false, only the values of options are checked.
    """
    if is_own(options):
        own = function_problems(KEY, options.source, names()) if reads_data else []
        return fraction_problems(options) + own
    if options.source in names():
        return find(options.source).check(options, reads_data)
    return [
        Problem(
            KEY,
            got=f"'{options.source}'",
            allowed=f"{', '.join(names())}, {FORM}",
            fix=nearest(options.source, names()),
            nearest="'python', the default",
        )
    ]


def vocabulary_of(options: DataOptions) -> int:
    """Returns the vocabulary size of a data source in tokens; 257 (as for bytes) for an unknown source.

    Raises:
      UserError: the tokenizer or the description of the tokens is missing or invalid; or the source is a user's
        function.
    """
    if is_own(options):
        raise UserError(
            Problem(
                "model.vocab_size",
                got=f"0 with data.source={options.source}, which has no tokenizer",
                allowed="a number above the largest token id",
                nearest="model.vocab_size=257",
                depends_on=["data.source"],
            )
        )
    return find(options.source).vocab_size(options) if options.source in names() else NUM_BYTES + 1
