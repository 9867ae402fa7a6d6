"""An optimizer, a learning rate and a tracker of one's own: they train, resume and are explained; faults are a line."""

import dataclasses
import json
import re
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from meshtrain import explain
from meshtrain.assembly.assemble import assemble
from meshtrain.config import __main__ as fields
from meshtrain.config import default, resolve, unused_options
from meshtrain.config.resume import difference
from meshtrain.errors import UserError
from meshtrain.main import main
from meshtrain.models.lora import LoraOptions
from meshtrain.observe.trackers import ObserveOptions, Trackers
from meshtrain.optim.learning_rate import LearningRateOptions, learning_rate
from meshtrain.optim.optimizers import optimizer
from meshtrain.options import option
from meshtrain.sharding.param_sharding import ZeroOptions
from meshtrain.sharding.rules import AXES
from meshtrain.sharding.trees import leaves_with_paths
from tests.parity import runs

OPTIMIZER = "docs.guide.own_optimizer:sign_momentum"
HERE = __name__


def resolved(*words, **given):
    return resolve(given, dict(word.split("=", 1) for word in words), reads_data=False)


def lines_of(*words, **given):
    with pytest.raises(UserError) as caught:
        resolved(*words, **given)
    return list(caught.value.problems)


# A learning rate and a tracker, as the page shows them.
@dataclasses.dataclass(frozen=True)
class StairsOptions:
    every: int = option(2, "updates on each stair", minimum=1)
    height: float = option(0.5, "of a stair, as a share of the one before it", minimum=0.0)
    decay_steps: int = option(0, "updates to the end of the decay; 0 means num_steps", minimum=0)


def stairs(options):
    return lambda count: options.height ** (jnp.minimum(count, options.decay_steps) // options.every)


stairs.options = StairsOptions


class Lines:
    """Appends a line of text for each row."""

    def __init__(self, options, directory, resume_step):
        self.file = (directory / options.name).open("a", encoding="utf-8")
        self.file.write(f"from step {resume_step}\n")

    def write(self, step, values):
        self.file.write(f"{step} {values['learning_rate']:.4f}\n" if "learning_rate" in values else "")

    def close(self):
        self.file.close()


@dataclasses.dataclass(frozen=True)
class LinesOptions:
    name: str = option("lines.txt", "the file, in the run's folder")


Lines.options = LinesOptions


class Kept(NamedTuple):
    momentum: optax.Updates
    few: optax.Updates


def odd_state(options, rates, axes):
    """Momentum, and for each weight an array whose last dim is 2, which divides the weight's and not by 4."""

    def init(params):
        few = jax.tree.map(lambda weight: jnp.zeros((*weight.shape[:-1], 2)), params)
        return Kept(jax.tree.map(jnp.zeros_like, params), few)

    def update(gradients, state, params=None):
        return jax.tree.map(lambda gradient: -0.1 * gradient, gradients), state

    return optax.GradientTransformation(init, update)


def assembled(name, mesh, **groups):
    config = dataclasses.replace(runs.CONFIG, optimizer=resolved(f"optimizer.name={name}").optimizer, **groups)
    return assemble(config, runs.sizes(**mesh), jax.devices()[: int(np.prod(list(mesh.values())))])


def splits(tree):
    return {path: leaf.sharding.spec for path, leaf in leaves_with_paths(tree)}


@pytest.mark.parametrize("level", [0, 1])
def test_a_state_is_split_as_that_of_a_built_in_optimizer(level):
    mesh, zero = {"data": 2, "tensor": 4}, ZeroOptions(level=level)
    own, of_sgd = (splits(assembled(name, mesh, zero=zero).state.opt_state) for name in (OPTIMIZER, "sgd"))
    traces = {path: spec for path, spec in of_sgd.items() if "/trace/" in path}
    assert traces.items() <= own.items()
    assert any("data" in spec for spec in traces.values()) == (level == 1)


def test_an_array_of_another_shape_is_whole_in_that_dim():
    state = assembled(f"{HERE}:odd_state", {"tensor": 4}).state.opt_state
    assert any("tensor" in spec for spec in splits(state.momentum).values())
    for leaf in jax.tree.leaves(state.few):
        assert leaf.sharding.shard_shape(leaf.shape)[-1] == 2


def test_frozen_weights_and_those_below_adapters_have_no_state():
    own = assembled(OPTIMIZER, {"data": 2}, lora=LoraOptions(rank=2)).state.opt_state
    traced = [path for path, _ in leaves_with_paths(own) if "/trace/" in path]
    assert traced
    assert all(path.endswith(("_lora_a", "_lora_b")) for path in traced)


def test_meshes_agree():
    options = resolved(f"optimizer.name={OPTIMIZER}", "optimizer.clip_norm=0").optimizer
    rates = LearningRateOptions(name="constant", peak=1e-4, warmup_steps=0)
    config = dataclasses.replace(runs.CONFIG, optimizer=options, learning_rate=rates)
    one, four = (runs.train(config, runs.sizes(**mesh)) for mesh in ({}, {"fsdp": 2, "tensor": 2}))
    np.testing.assert_allclose(one.losses, four.losses, rtol=1e-5)
    assert one.losses[-1] < one.losses[0]


def test_a_run_with_all_three_goes_on_on_another_mesh(tmp_path):
    words = [
        "--config=docs/guide/own_model.py", f"--config.optimizer.name={OPTIMIZER}", "--config.optimizer.nesterov=no",
        f"--config.learning_rate.name={HERE}:stairs", "--config.learning_rate.warmup_steps=0",
        "--config.learning_rate.peak=0.01", "--config.learning_rate.every=3", "--config.learning_rate.decay_steps=6",
        "--config.observe.progress=no", "--config.sample_tokens=0", "--config.num_eval_batches=1",
        "--config.log_every=1",
    ]  # fmt: skip
    tracked = [f"--config.observe.tracker={HERE}:Lines"]

    def losses(folder):
        rows = [json.loads(line) for line in (tmp_path / folder / "metrics.jsonl").read_text().splitlines()]
        return [row["loss"] for row in rows if "loss" in row]

    assert main([*words, f"--workdir={tmp_path / 'whole'}", "--config.num_steps=6"]) == 0
    in_two = [*words, *tracked, f"--workdir={tmp_path / 'parts'}"]
    assert main([*in_two, "--config.num_steps=3"]) == 0
    assert main([*in_two, "--config.num_steps=6", "--config.mesh.tensor=1", "--config.mesh.fsdp=4"]) == 0
    np.testing.assert_allclose(losses("parts"), losses("whole"), rtol=1e-5)
    written = (tmp_path / "parts" / "lines.txt").read_text().splitlines()
    assert written == [
        "from step 0", "1 0.0100", "2 0.0100", "3 0.0100", "from step 3", "4 0.0050", "5 0.0050", "6 0.0050"
    ]  # fmt: skip
    kept = json.loads((tmp_path / "parts" / "config.json").read_text())
    assert (kept["optimizer"]["nesterov"], kept["learning_rate"]["every"]) == (False, 3)
    with pytest.raises(UserError, match=r"another run: optimizer\.nesterov: was false, now true"):
        main([*in_two, "--config.num_steps=6", "--config.optimizer.nesterov=yes"])


def test_explain_names_them_with_their_options_and_what_is_not_read(capsys):
    words = [f"optimizer.name={OPTIMIZER}", "optimizer.momentum=0.9", f"learning_rate.name={HERE}:stairs"]
    words += ["optimizer.beta1=0.5", f"observe.tracker={HERE}:Lines"]
    assert explain.main([f"--config.{word}" for word in words]) == 0
    printed = capsys.readouterr().out
    assert f"\ncustom       optimizer.name={OPTIMIZER}, momentum=0.9, weight_decay=0.1, nesterov=true\n" in printed
    assert f"\ncustom       learning_rate.name={HERE}:stairs, every=2, height=0.5, decay_steps=0\n" in printed
    assert f'\ncustom       observe.tracker={HERE}:Lines, name="lines.txt"\n' in printed
    config = resolved(*words)
    assert unused_options.without_effect(config, dict.fromkeys(AXES, 1)) == {
        "optimizer.beta1": f"optimizer.name={OPTIMIZER}"
    }
    assert fields.main([f"--config.{words[0]}"]) == 0
    assert re.search(r"^optimizer.nesterov +bool +true", capsys.readouterr().out, re.MULTILINE)


def test_shares_of_the_peak_follow_the_warm_up():
    options = resolved(f"learning_rate.name={HERE}:stairs", "learning_rate.peak=1", "learning_rate.warmup_steps=2")
    rates = learning_rate(options.learning_rate, num_steps=7, embed_dim=1, batch_size=1)
    np.testing.assert_array_equal(
        [float(rates(count)) for count in range(9)], [0.5, 1] + 2 * [0.5] + 2 * [0.25] + 3 * [0.125]
    )


def test_a_configuration_that_holds_the_defaults_names_one():
    config = default()
    config.optimizer.name, config.optimizer.nesterov = OPTIMIZER, False
    assert not resolve(config, reads_data=False).optimizer.nesterov
    assert resolve(resolve(config, reads_data=False), reads_data=False).optimizer.name == OPTIMIZER
    assert resolve(config, {"optimizer.name": "sgd"}, reads_data=False).optimizer.name == "sgd"


def test_what_a_tracker_raises_is_one_warning(tmp_path, capsys):
    options = resolved(f"observe.tracker={HERE}:Lines", "observe.tensorboard=no").observe
    run = Trackers(options, tmp_path)
    run.write(1, {"learning_rate": 0.1})
    run.write(2, {"learning_rate": None})
    run.write(3, {"learning_rate": None})
    run.close()
    run.close()
    error = capsys.readouterr().err
    assert error.count("WARNING") == 1
    assert f"WARNING: {HERE}:Lines: TypeError: " in error
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 3


def no_options(*_):
    raise AssertionError


no_options.options = dict


def other_default(*_):
    raise AssertionError


@dataclasses.dataclass(frozen=True)
class OtherDefault:
    beta1: float = option(0.5, "as that of the built-in ones")


other_default.options = OtherDefault


@pytest.mark.parametrize("key", ["optimizer.name", "learning_rate.name", "observe.tracker"])
@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("no.such:one", "but there is no module 'no' .*, or package.module:function; nearest: (adamw|cosine|none)"),
        (f"{HERE}:no_options", r"whose options are <class 'dict'>; .*; nearest: @dataclass\(frozen=True\)"),
    ],
)
def test_a_name_that_names_none_is_one_line(key, name, line):
    """The options of one that is not there are not known: nothing is said about them."""
    [said] = lines_of(f"{key}={name}", f"{key.partition('.')[0]}.mine=3")
    assert re.fullmatch(f"{key}: got '{name}', {line}", said), said


@pytest.mark.parametrize(
    ("key", "name", "fix"),
    [
        ("learning_rate.name", f"{HERE}:stair", "did you mean 'stairs'?"),
        ("optimizer.name", f"{HERE}:stair", "nearest: optimizer.name=adamw"),  # `stairs` takes one argument
        ("optimizer.name", "docs.guide.own_optimizer:nothing", "nearest: optimizer.name=adamw"),  # it imports `option`
        ("optimizer.name", "docs.guide.own_optimizer:sign_moment", "did you mean 'sign_momentum'?"),
    ],
)
def test_a_function_that_is_not_there_has_one_near_that_can_be_called_in_its_place(key, name, fix):
    [said] = lines_of(f"{key}={name}")
    module, _, function = name.partition(":")
    assert said.startswith(f"{key}: got '{name}', but {module} has no '{function}'; allowed: ")
    assert said.endswith(f"; {fix}")


def test_a_run_older_than_an_option_of_its_own_function_goes_on():
    config = dataclasses.asdict(resolved(f"optimizer.name={OPTIMIZER}", f"learning_rate.name={HERE}:stairs"))
    older = json.loads(json.dumps(config))
    del older["optimizer"]["nesterov"], older["learning_rate"]["every"]
    assert difference(older, config) == []
    config["optimizer"]["nesterov"] = False
    assert difference(older, config) == ["optimizer.nesterov: was true, now false"]


def test_an_option_of_a_name_that_is_there_has_its_default():
    assert lines_of(f"optimizer.name={HERE}:other_default") == [
        (
            f"optimizer.beta1: got 0.5 as the default in {HERE}:OtherDefault; allowed: 0.9, the default of "
            "meshtrain's option with this name, or another name; nearest: own_beta1"
        )
    ]


def test_own_options_are_checked_as_the_others_are():
    assert lines_of(f"optimizer.name={OPTIMIZER}", "optimizer.momentum=2", "optimizer.nestero=no") == [
        f"optimizer.nestero: unknown key; allowed: {', '.join(optimizer_keys())}; did you mean 'optimizer.nesterov'?",
        "optimizer.momentum: got 2; allowed: at most 0.999; nearest: 0.999",
    ]


def optimizer_keys():
    options = resolved(f"optimizer.name={OPTIMIZER}").optimizer
    return [f"optimizer.{field.name}" for field in dataclasses.fields(options)]


def built(name):
    weights, axes = {"w": jnp.ones((2, 3))}, {"w": ("embed", "mlp")}
    optimizer(resolved(f"optimizer.name={HERE}:{name}").optimizer, lambda count: 0.1, axes).init(weights)


def two(options, rates):
    raise AssertionError


def raises(options, *_):
    raise RuntimeError("no idea")


def nothing(options, *_):
    return None


def fails(options, rates, axes):
    return optax.GradientTransformation(lambda params: params["v"], None)


def transposed(options, rates, axes):
    return optax.stateless(lambda gradients, params: jax.tree.map(jnp.transpose, gradients))


def half(options, rates, axes):
    update = lambda gradients, state, params: (gradients, state.astype(jnp.float32))  # noqa: E731
    return optax.GradientTransformation(lambda params: jnp.zeros(3, jnp.bfloat16), update)


@pytest.mark.parametrize(
    ("name", "line"),
    [
        (
            "two",
            (
                r"which does not accept options, learning rates and logical axes \(.*\); .* def two\(options, "
                r"rates, axes\)"
            ),
        ),
        ("raises", r"which raises RuntimeError: no idea \(.*test_own_functions.py:\d+\); allowed: an optax.Grad.*"),
        ("nothing", r"which returns NoneType; allowed: an optax.GradientTransformation; nearest: optax.chain\(...\)"),
        (
            "fails",
            r"whose init or update raises KeyError: 'v' \(.*test_own_functions.py:\d+\); .*; nearest: correct the .*",
        ),
        (
            "transposed",
            r"whose update returns float32\[3, 2\] for w instead of float32\[2, 3\]; allowed: updates with .*",
        ),
        (
            "half",
            r"whose update returns float32\[3\] for  instead of bfloat16\[3\]; allowed: .* with those from init; .*",
        ),
    ],
)
def test_what_is_no_optimizer_is_one_line(name, line):
    with pytest.raises(UserError) as caught:
        built(name)
    [said] = caught.value.problems
    assert re.fullmatch(f"optimizer.name: got '{HERE}:{name}', {line}", said), said


def branches(options):
    return lambda count: 1.0 if count < 5 else 0.5


def pair(options):
    return lambda count: jnp.array([1.0, 2.0])


@pytest.mark.parametrize(
    ("name", "line"),
    [
        (
            "nothing",
            "whose result raises TypeError: 'NoneType' object is not callable .*; allowed: a function that .*",
        ),
        ("branches", r"whose result raises TracerBoolConversionError: .*test_own_functions.py:\d+\); .*jnp.where.*"),
        ("pair", r"which returns an array of shape \[2\]; .*; nearest: a scalar"),
    ],
)
def test_what_is_no_learning_rate_is_one_line(name, line):
    options = resolved(f"learning_rate.name={HERE}:{name}").learning_rate
    with pytest.raises(UserError) as caught:
        learning_rate(options, num_steps=7, embed_dim=1, batch_size=1)
    [said] = caught.value.problems
    assert re.fullmatch(f"learning_rate.name: got '{HERE}:{name}', {line}", said), said


def test_what_is_no_tracker_is_one_line(tmp_path):
    with pytest.raises(UserError) as caught:
        Trackers(ObserveOptions(tensorboard=False, tracker=f"{HERE}:nothing"), tmp_path)
    assert caught.value.problems == (
        f"observe.tracker: got '{HERE}:nothing', which returns NoneType without write and close; allowed: an object "
        "with write(step, values) and close(); nearest: none",
    )
