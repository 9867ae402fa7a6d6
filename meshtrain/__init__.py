"""Trains models on any mesh of accelerators, and reports before a run what it will need.

import meshtrain

meshtrain.simulate(8)  # on a machine without accelerators: simulates eight devices on the CPU
config = meshtrain.default()
config.mesh.data = 2
meshtrain.train(config, "runs/mine")
"""

from __future__ import annotations

import importlib

TYPE_CHECKING = False  # importing `typing` takes time, and a signal during the import would cause a traceback
if TYPE_CHECKING:
    from typing import Any

    from meshtrain.config.build import default as default
    from meshtrain.config.resolve import resolve as resolve
    from meshtrain.launch.distributed import simulate as simulate
    from meshtrain.models.nnx_module import from_nnx as from_nnx
    from meshtrain.sharding.named import Named as Named
    from meshtrain.training import Result as Result
    from meshtrain.training import train as train

__version__ = "0.3.0"

_NAMES = {
    "default": "meshtrain.config",
    "resolve": "meshtrain.config",
    "simulate": "meshtrain.launch.distributed",
    "from_nnx": "meshtrain.models.nnx_module",
    "Named": "meshtrain.sharding.named",
    "Result": "meshtrain.training",
    "train": "meshtrain.training",
}


def __getattr__(name: str) -> Any:
    # Imported on first use, so that `--help` does not wait for JAX.
    if name not in _NAMES:
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    return getattr(importlib.import_module(_NAMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_NAMES])
