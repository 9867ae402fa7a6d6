"""The record of a configuration in a run's files (config.json, and `config` of a checkpoint): options and version."""

import dataclasses
from collections.abc import Mapping

from meshtrain import __version__
from meshtrain.config.schema import Config
from meshtrain.errors import Problem
from meshtrain.files import Json, JsonObject

VERSION = "version"  # the key of the version that wrote a record; records of 0.2 have none
RELEASE = __version__.rpartition(".")[0]  # without the last number


def record(config: Config) -> JsonObject:
    """Returns a configuration for a file of a run: nested as the options are, with every field and the version."""
    return {VERSION: __version__, **dataclasses.asdict(config)}


def without_version(values: Mapping[str, Json]) -> JsonObject:
    """Returns the options of a record."""
    return {key: value for key, value in values.items() if key != VERSION}


def is_of_this_release(values: Mapping[str, Json]) -> bool:
    """Returns whether a run with this record can resume: a version with the same first two numbers wrote it."""
    return VERSION in values and str(values[VERSION]).rpartition(".")[0] == RELEASE


def version_problem(values: Mapping[str, Json], place: str, fix: str) -> Problem:
    """Returns the problem of the record of a run that another release wrote.

    Args:
      values: the record.
      place: the file or folder with the record.
      fix: the nearest legal command.
    """
    version = values[VERSION] if VERSION in values else "0.2 or earlier"
    return Problem(place, got=f"version {version}", allowed=RELEASE, nearest=fix)
