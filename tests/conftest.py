"""Eight virtual CPU devices for every test, asked for before anything can query a device; and what tests cost."""

import collections
import contextlib
import gc
import os
import pathlib
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import hypothesis
import jax
import pytest

from tests import bucket_process, quick, signals

NUM_DEVICES = 8
TESTS = pathlib.Path(__file__).parent
# Tests that share what is made once a session run in one worker: fixture -> group.
GROUPS = {"straight": "run", "stopped": "run", "steps": "steps"}
REST = "(collection, imports, workers)"

# The same examples on every run, and no deadline: a busy machine must not fail a test.
hypothesis.settings.register_profile("meshtrain", deadline=None, derandomize=True, database=None)
hypothesis.settings.load_profile("meshtrain")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds `--cost`."""
    parser.addoption("--cost", action="store_true", help="print the CPU seconds of each folder, children included")


def pytest_configure(config: pytest.Config) -> None:
    """Sets up JAX for eight simulated devices, and signals for what the tests start."""
    # Workers start from a process that still ignores what they have to survive themselves.
    if hasattr(config, "workerinput") or not config.getoption("numprocesses", None):
        signals.handled_instead_of_ignored()
    config.stash[COST] = collections.Counter()
    config.addinivalue_line("markers", "xdist_group(name): one worker runs the group")  # known without xdist, too
    # What runs record outside of their folders ends with the session.
    state = tempfile.TemporaryDirectory(prefix="meshtrain-state-")
    config.add_cleanup(state.cleanup)
    os.environ["XDG_STATE_HOME"] = state.name
    # In the environment too, so that programs which tests start see no accelerator either.
    os.environ["JAX_PLATFORMS"] = "cpu"
    # Compiling is most of what the tests do. Programs that they start get the same, unless the caller says otherwise.
    os.environ.setdefault("XLA_FLAGS", " ".join(quick.xla_flags()))
    quick.compile_quickly(quickly=True)
    # Where in the source an operation stands takes a sixth of the time of compiling.
    os.environ.setdefault("JAX_TRACEBACK_IN_LOCATIONS_LIMIT", "0")
    jax.config.update("jax_traceback_in_locations_limit", int(os.environ["JAX_TRACEBACK_IN_LOCATIONS_LIMIT"]))
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", NUM_DEVICES)
    cache = getattr(config, "cache", None)
    if cache is not None:  # None under `-p no:cacheprovider`
        # For all workers: JAX writes entries in place, and where another worker reads half of one, it compiles.
        jax.config.update("jax_compilation_cache_dir", str(cache.mkdir(f"jax-{jax.__version__}")))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Makes groups for `--dist loadgroup`, each for one worker: what shares a session fixture, else what shares a file.

    A test that names its own group (`pytest.mark.xdist_group`) stays in it.
    """
    for item in items:
        if item.get_closest_marker("xdist_group") is None:
            shared = [GROUPS[name] for name in GROUPS if name in getattr(item, "fixturenames", ())]
            item.add_marker(pytest.mark.xdist_group([*shared, item.nodeid.partition("::")[0]][0]))


def pytest_collection_finish() -> None:
    """Has garbage collected less often, and leaves out what has been imported: tracing makes objects by the million."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 20, 50)


@pytest.fixture(scope="session", autouse=True)
def _eight_devices() -> None:
    """Fails the whole session, rather than skip a part of it, where the devices are not there."""
    found = jax.devices()
    assert len(found) == NUM_DEVICES, f"the tests need {NUM_DEVICES} CPU devices, found {found}"
    assert {device.platform for device in found} == {"cpu"}, found


@pytest.fixture
def exact_bits() -> Iterator[None]:
    """What a test compiles has the same last bits wherever the same operations stand in another program."""
    with quick.exact():
        yield


@pytest.fixture(scope="session")
def bucket_server() -> Iterator[bucket_process.Server]:
    """A bucket server in a process of its own, to which all clients of this process and of its children talk."""
    with bucket_process.started() as server:
        os.environ.update(server.environment)
        yield server


@pytest.fixture
def bucket(bucket_server: bucket_process.Server) -> str:
    """A prefix without any object."""
    return bucket_server.prefix()


# CPU seconds by folder, of this process and of the children that it has waited for.
COST = pytest.StashKey[collections.Counter]()


def cpu_seconds() -> float:
    """Returns what this process and the children that it has waited for have computed so far, all threads."""
    return sum(os.times()[:4])


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Adds what a test costs, with the fixtures that it sets up and tears down, to its folder and to itself.

    What the compilers of GPUs and TPUs make of a step is shown as users see it, fixtures included.
    """
    before = cpu_seconds()
    try:
        with contextlib.ExitStack() as stack:
            if item.get_closest_marker("gpu_compiler"):
                stack.enter_context(quick.exact())
                stack.enter_context(quick.with_places())
            return (yield)
    finally:
        spent = cpu_seconds() - before
        item.config.stash[COST][item.path.relative_to(TESTS).parts[0]] += spent
        item.config.stash[COST][item.nodeid.partition("::")[0]] += spent


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Hands a worker's sums to the process that prints them."""
    config = session.config
    costs = config.stash[COST]
    if config.pluginmanager.hasplugin("dsession"):  # the workers are its children, and count themselves
        costs[REST] += sum(os.times()[:2])
    else:
        costs[REST] += cpu_seconds() - sum(costs[name] for name in costs if not name.endswith(".py"))
    if hasattr(config, "workeroutput"):
        config.workeroutput["cost"] = dict(costs)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: object) -> None:
    """Adds up what the workers have spent."""
    output = getattr(node, "workeroutput", None)
    if output:  # None of a worker that died
        node.config.stash[COST].update(output["cost"])


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Prints CPU seconds by folder, and those of the files that take most."""
    if not config.option.cost:
        return
    folders = {name: spent for name, spent in config.stash[COST].items() if not name.endswith(".py")}
    files = {name: spent for name, spent in config.stash[COST].items() if name.endswith(".py")}
    terminalreporter.section("CPU seconds")
    for name, spent in sorted(folders.items(), key=lambda pair: -pair[1]):
        terminalreporter.write_line(f"{spent:8.1f}  {name}")
    terminalreporter.write_line(f"{sum(folders.values()):8.1f}  all; over two cores {sum(folders.values()) / 2:.0f}")
    for name, spent in sorted(files.items(), key=lambda pair: -pair[1])[:25]:
        terminalreporter.write_line(f"{spent:8.1f}  {name}")


def _carried(jaxpr: Any) -> Iterator[tuple[int, ...]]:
    for equation in jaxpr.eqns:
        bodies = [
            getattr(one, "jaxpr", one)
            for value in equation.params.values()
            for one in (value if isinstance(value, tuple | list) else [value])
            if hasattr(one, "eqns") or hasattr(one, "jaxpr")
        ]
        if equation.primitive.name == "scan":
            # What is stacked has one dim less inside. Versions of JAX name the counts differently.
            pairs = zip(bodies[0].outvars, equation.outvars, strict=True)
            yield from (after.aval.shape for one, after in pairs if one.aval.ndim == after.aval.ndim)
        for body in bodies:
            yield from _carried(body)


@pytest.fixture(scope="session")
def carried_shapes() -> Callable[[Any], set[tuple[int, ...]]]:
    """A function (assembly) -> the shapes that the loops of its traced step carry from round to round."""

    def shapes(assembly: Any) -> set[tuple[int, ...]]:
        return set(_carried(assembly.steps.train.trace(assembly.state, assembly.batch).jaxpr.jaxpr))

    return shapes


@pytest.fixture(scope="session")
def written() -> Callable[[pathlib.Path], dict[str, tuple[int, bytes]]]:
    """A function directory -> what stands in it, and since when."""

    def files(directory: pathlib.Path) -> dict[str, tuple[int, bytes]]:
        return {
            str(path): (path.stat().st_mtime_ns, path.read_bytes())
            for path in sorted(directory.rglob("*"))
            if path.is_file()
        }

    return files
