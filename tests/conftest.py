"""Eight virtual CPU devices for every test, asked for before anything can query a device."""

import os

import hypothesis
import jax
import pytest

NUM_DEVICES = 8

# The same examples on every run, and no deadline: a busy machine must not fail a test.
hypothesis.settings.register_profile("meshtrain", deadline=None, derandomize=True, database=None)
hypothesis.settings.load_profile("meshtrain")


def pytest_configure(config: pytest.Config) -> None:
    """Sets up JAX, unless the tests chosen are those that want the machine's own accelerator."""
    if config.option.markexpr == "accelerator":
        return
    # In the environment too, so that programs which tests start see no accelerator either.
    os.environ["JAX_PLATFORMS"] = "cpu"
    # Compiling is most of what the tests do. Not 0: there, one source gives other last bits in other programs.
    # Programs that the tests start get the same, unless the caller says otherwise.
    os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=1")
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", NUM_DEVICES)
    cache = getattr(config, "cache", None)
    if cache is not None:  # None under `-p no:cacheprovider`
        # One folder a worker: JAX writes entries in place, and another worker could read half of one.
        worker = getattr(config, "workerinput", {"workerid": "main"})["workerid"]
        jax.config.update("jax_compilation_cache_dir", str(cache.mkdir(f"jax-{jax.__version__}-{worker}")))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


@pytest.fixture(scope="session", autouse=True)
def _eight_devices(request: pytest.FixtureRequest) -> None:
    """Fails the whole session, rather than skip a part of it, where the devices are not there."""
    if request.config.option.markexpr != "accelerator":
        found = jax.devices()
        assert len(found) == NUM_DEVICES, f"the tests need {NUM_DEVICES} CPU devices, found {found}"
        assert {device.platform for device in found} == {"cpu"}, found
