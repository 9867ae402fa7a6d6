"""Trains transformers on any mesh of accelerators, and knows before a run what it needs.

    import meshtrain
    from meshtrain.config import default

    config = default()
    config.mesh.data = 2
    meshtrain.train(config, "runs/mine")

`meshtrain.train` is always the function, however its module was imported before; what else that module holds comes by
`from meshtrain.train import Result`.
"""

import importlib
import sys
import types
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from meshtrain.train import train as train

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    # Only when it is asked for: JAX takes longer to load than `--help` may take to answer.
    if name != "train":
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    return importlib.import_module("meshtrain.train").train


class _Package(types.ModuleType):
    def __setattr__(self, name: str, value: Any) -> None:
        # Importing a submodule binds it to its name in the package. This one would hide the function of that name.
        if not (name == "train" and isinstance(value, types.ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
