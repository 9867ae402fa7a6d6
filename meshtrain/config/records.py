"""Writes and reads the configuration in files of a run: config.json, and the entry `config` of a checkpoint.

A file contains the values of all options, and the version of meshtrain.
"""

import dataclasses
from collections.abc import Mapping

from meshtrain import __version__
from meshtrain.config.schema import Config
from meshtrain.errors import Problem
from meshtrain.files import Json, JsonObject

VERSION = "version"  # the key of the version of meshtrain that wrote the file; files of version 0.2 lack it
RELEASE = __version__.rpartition(".")[0]  # the version without its last number


def record(config: Config) -> JsonObject:
    """Returns a configuration as a nested JSON object for a file of a run: the version, and every field."""
    return {VERSION: __version__, **dataclasses.asdict(config)}


def without_version(values: Mapping[str, Json]) -> JsonObject:
    """Returns the options of a configuration that was read from a file of a run, without the version."""
    return {key: value for key, value in values.items() if key != VERSION}


def is_of_this_release(values: Mapping[str, Json]) -> bool:
    """Returns whether a run can resume: a version of meshtrain with the same first two numbers wrote its configuration.

    Args:
      values: the content of the run's config.json.
    """
    return VERSION in values and str(values[VERSION]).rpartition(".")[0] == RELEASE


def version_problem(values: Mapping[str, Json], place: str, fix: str) -> Problem:
    """Returns the error line for a run whose configuration another release of meshtrain wrote.

    Args:
      values: the content of the run's config.json.
      place: the path of this file, or of its folder.
      fix: the suggested command.
    """
    version = values[VERSION] if VERSION in values else "0.2 or earlier"
    return Problem(place, got=f"version {version}", allowed=RELEASE, nearest=fix)
