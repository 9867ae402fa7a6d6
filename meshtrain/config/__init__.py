"""WHAT was chosen? One configuration: the options of all rooms in one dataclass, checked as a whole."""

from meshtrain.config.config import Config as Config
from meshtrain.config.config import default as default
from meshtrain.config.config import resolve as resolve
