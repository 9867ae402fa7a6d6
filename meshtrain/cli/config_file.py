"""Runs a configuration's Python file and returns what its `get_config()` returns."""

import inspect
import pathlib
import re
import traceback
from collections.abc import Sequence

from meshtrain.errors import UserError, first_line, nearest
from meshtrain.files import what_is_at
from meshtrain.options import Imported

_MOST_LISTED = 20  # files of a folder


def load(path: str, keys: Sequence[str]) -> Imported:
    """Runs a configuration file and returns what its `get_config()` returns.

    Args:
      path: a Python file.
      keys: the dotted keys of the configuration, to suggest one for a misspelt name.

    Raises:
      UserError: one line: no such file, not Python, no `get_config`, or an exception in it with its line number.
    """
    if (what := what_is_at(path)) != "a file":
        raise UserError(_no_file(path, what))
    # Compiled rather than imported: 3d.py is no legal module name, and an import would write a __pycache__.
    module: dict[str, Imported] = {"__name__": pathlib.Path(path).stem, "__file__": path}
    try:
        exec(compile(pathlib.Path(path).read_bytes(), path, "exec"), module)
        if "get_config" not in module:
            fix = nearest("get_config", [name for name in module if callable(module[name])]) or near_example()
            raise UserError(f"--config: '{path}' has no get_config(); allowed: a function of that name{fix}")
        given = module["get_config"]()
        if inspect.iscoroutine(given):
            given.close()  # an unawaited coroutine prints a warning
        return given
    except (UserError, KeyboardInterrupt):
        raise
    except SyntaxError as error:
        line = f":{error.lineno}" if error.lineno else ""
        reason = f"{path}{line}: {type(error).__name__}: {error.msg}"
        raise UserError(f"{reason}; allowed: Python in UTF-8{near_example()}") from error
    except BaseException as error:  # SystemExit too: a configuration file must not end the program
        raise UserError(_inside(path, error, keys)) from error


def near_example() -> str:
    """Returns `; nearest: ` and a configuration file that runs, for the end of a line."""
    is_here = what_is_at("configs/3d.py") == "a file"  # of the repository; an installation has none
    one_line = "a file of one line, from meshtrain.config import default as get_config"
    return f"; nearest: {'configs/3d.py' if is_here else one_line}"


def _no_file(path: str, what: str) -> str:
    folder = pathlib.Path(path).parent
    others = []
    if what_is_at(folder) == "a folder":
        others = [str(other) for other in sorted(folder.glob("*.py")) if what_is_at(other) == "a file"]
    listed = f"; in that folder: {', '.join(others[:_MOST_LISTED])}" if others else ""
    states = {"nothing there": "does not exist", "a folder": "is not a file but a folder"}
    got = states[what] if what in states else f"cannot be read: {what}"
    fix = nearest(path, others) or near_example()
    return f"--config: '{path}' {got}; allowed: a Python file with get_config(){listed}{fix}"


def _inside(path: str, error: BaseException, keys: Sequence[str]) -> str:
    """Returns one line for an exception that a configuration file raised."""
    names = {name for key in keys for name in key.split(".")}
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == path]
    where = f"{path}:{frames[-1].lineno}" if frames else path
    reason = first_line(error)
    # The message of a ConfigDict for a missing key has the key in two pairs of quotes, and other keys after it.
    word = re.match(r'\W*(?:Key ")?(\w+)', reason)
    last_frame = traceback.extract_tb(error.__traceback__)[-1]
    if isinstance(error, (AttributeError, KeyError)) and word and "ml_collections" in last_frame.filename:
        fix = nearest(word[1], names) or near_example()
        return f"{where}: unknown key '{word[1]}'; allowed: what `python -m meshtrain config` lists{fix}"
    return f"{where}: {type(error).__name__}: {reason}; allowed: a get_config() that returns{near_example()}"
