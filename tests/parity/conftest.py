"""References, each made once; and the comparison of a run with its reference."""

import dataclasses
from collections.abc import Callable

import pytest

from meshtrain.config.schema import Config
from tests.parity import runs
from tests.parity.comparison import Trained, assert_same


@pytest.fixture(scope="session")
def reference() -> Callable[[Config], Trained]:
    """A function configuration -> what plain JAX makes of it on one device, remembered."""
    made: dict[Config, Trained] = {}

    def of(config: Config) -> Trained:
        # What decides about numbers, and nothing else.
        numbers = dataclasses.replace(
            runs.CONFIG,
            model=config.model,
            optimizer=config.optimizer,
            learning_rate=config.learning_rate,
            num_steps=config.num_steps,
            seed=config.seed,
        )
        if numbers not in made:
            made[numbers] = runs.reference(numbers)
        return made[numbers]

    return of


@pytest.fixture(scope="session")
def assert_parity(reference: Callable[[Config], Trained]) -> Callable[..., Trained]:
    """A function (configuration, mesh axes) -> a run on the mesh, compared with its reference."""

    def compare(config: Config, **axes: int) -> Trained:
        got = runs.train(config, runs.sizes(**axes))
        assert_same(got, reference(config), zero_gradients=runs.has_zero_gradients(config))
        return got

    return compare
