"""A reduction over data of one's own: the example of the docs trains, and what is wrong with others is one line."""

import dataclasses
import functools
import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshtrain import explain
from meshtrain.assembly.assemble import assemble
from meshtrain.config.resolve import resolve
from meshtrain.errors import UserError
from meshtrain.options import option
from meshtrain.sharding.param_sharding import ZeroOptions
from meshtrain.sharding.reduction import Reduction, ReductionOptions
from tests.parity import runs

EXAMPLE = "docs.guide.own_reduction:ring"
HERE = "tests.own.test_own_reduction"
SMALL = dataclasses.replace(runs.CONFIG, model=dataclasses.replace(runs.LLAMA, num_layers=2))


@functools.cache
def of_one_device():
    """The run with the built-in sum."""
    return runs.train(SMALL, runs.sizes())


@pytest.mark.parametrize(("level", "mesh"), [(0, {"data": 4}), (1, {"data": 2, "fsdp": 2}), (0, {})], ids=str)
def test_it_trains_with_the_losses_of_the_built_in_sum(level, mesh):
    own = runs.train(
        dataclasses.replace(SMALL, reduction=ReductionOptions(EXAMPLE), zero=ZeroOptions(level)), runs.sizes(**mesh)
    )
    np.testing.assert_allclose(own.losses, of_one_device().losses, rtol=1e-5)
    np.testing.assert_allclose(own.grad_norms, of_one_device().grad_norms, rtol=1e-5)
    assert own.losses[-1] < own.losses[0]


def test_explain_names_it(capsys):
    words = ["--config.mesh.data=8", f"--config.reduction.name={EXAMPLE}", "--config.model.num_layers=2"]
    assert explain.main(words) == 0
    assert f"\nreduction    {EXAMPLE}, 7 bytes per parameter sent over data=8\n" in capsys.readouterr().out


@dataclasses.dataclass(frozen=True)
class Slow:
    """Options of one's own."""

    share: float = option(0.5, "of what waits that is sent in a step", minimum=0.0, maximum=1.0)


def slowly(options, dtype):
    """Sends a share of gradient and residual, and keeps the rest."""

    def reduce(gradients, residual, over, scattered):
        total = jax.tree.map(jnp.add, gradients, residual)
        sent = jax.tree.map(lambda leaf: jax.lax.psum(options.share * leaf, over), total)
        return sent, jax.tree.map(lambda leaf: (1 - options.share) * leaf, total)

    return Reduction(reduce, lambda elements, n, is_scattered: 0.0, init=lambda shapes: shapes)


def check(config, mesh_shape):
    return ["seed: got 7; allowed: 8; nearest: 8"] if config.seed == 7 else []


slowly.options, slowly.check = Slow, check


def test_its_options_are_typed_and_reach_it():
    mine = {"name": f"{HERE}:slowly", "share": 0.25}
    config = resolve({"reduction": mine, "mesh": {"data": 2}, "batch_size": 16, "sequence_length": 32})
    assert dataclasses.asdict(config.reduction) == mine
    config = dataclasses.replace(SMALL, reduction=config.reduction)
    assembly = assemble(config, runs.sizes(data=2), jax.devices()[:2])
    state = assembly.steps.init(jax.random.key_data(jax.random.key(0)))
    batch = {name: jax.device_put(x, assembly.batch[name].sharding) for name, x in runs.example_batches()[0].items()}
    state, metrics = assembly.steps.train(state, batch)
    (plain, *_) = of_one_device().grad_norms
    assert float(metrics["grad_norm"]) == pytest.approx(0.25 * plain, rel=1e-5)
    waiting = np.sqrt(sum(float(jnp.sum(jnp.sum(leaf, axis=0) ** 2)) for leaf in jax.tree.leaves(state.extra)))
    assert waiting == pytest.approx(0.75 * plain, rel=1e-5)


def test_another_name_on_the_command_line_drops_the_options_of_the_files():
    given = {"reduction": {"name": f"{HERE}:slowly", "share": 0.25}}
    assert resolve(given, {"reduction.name": "sum"}).reduction == ReductionOptions()
    assert resolve(given, {"reduction.share": "0.5"}).reduction.share == 0.5


def other(options, dtype):
    return "sum"


def raises(options, dtype):
    raise RuntimeError("no idea\nand no second line")


def narrow(options, dtype):
    reduce = lambda gradients, residual, over, scattered: (  # noqa: E731
        jax.tree.map(lambda leaf: jax.lax.psum(leaf.astype(jnp.bfloat16), over), gradients), residual
    )  # fmt: skip
    return Reduction(reduce, lambda elements, n, is_scattered: 0.0)


def keeps_another_shape(options, dtype):
    return dataclasses.replace(narrow(options, dtype), init=lambda shapes: list(shapes))


@pytest.mark.parametrize(
    ("name", "said"),
    [
        (narrow, r"whose update returns 0/\S+ bfloat16\[.*\]; allowed: 0/\S+ float32\[.*; nearest: "),
        (keeps_another_shape, r"whose init returns .*; allowed: the shapes of its argument, or \(\); nearest: "),
    ],
)
def test_trees_that_do_not_fit_are_refused_with_their_name(name, said):
    config = dataclasses.replace(SMALL, reduction=ReductionOptions(f"{HERE}:{name.__name__}"))
    with pytest.raises(UserError, match=said):
        runs.train(config, runs.sizes(data=2))


@pytest.mark.parametrize("check", [lambda config: [], lambda config, mesh_shape: [config.nothing]])
def test_what_its_check_raises_is_one_line(check, monkeypatch):
    monkeypatch.setattr(importlib.import_module(HERE).slowly, "check", check)
    wanted = r"^reduction\.name: got '\S+:slowly', whose check raises (Type|Attribute)Error: .*; allowed: a list"
    with pytest.raises(UserError, match=wanted):
        resolve({"reduction": {"name": f"{HERE}:slowly"}, "mesh": {"data": 2}})
