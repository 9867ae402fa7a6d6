"""WHAT was chosen? One configuration, summed up from the rooms' options and checked as a whole."""

from meshtrain.config.config import Config as Config
from meshtrain.config.config import default as default
from meshtrain.config.config import resolve as resolve
