"""What a task of one's own may get wrong without a word from JAX: one line before the first step."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.linen import LogicallyPartitioned as Boxed

import meshtrain
from meshtrain.data.dataset import Dataset
from meshtrain.errors import TrainingStopped, UserError
from meshtrain.models.task import Entry, Stages, Task, loss_of_stages

B, D, C, L = 16, 8, 5, 3
HERE = __name__


def nll(x, head, labels):
    return -jnp.take_along_axis(jax.nn.log_softmax(x @ head), labels[:, None], 1).sum()


def scan(layers, x, batch, rng, index, train):
    return jax.lax.scan(lambda x, w: (x + jnp.tanh(x @ w), None), x, layers["w"])[0], None


def stages(num_layers=L, last=None):
    def sums(params, x, batch, axis):
        return nll(x, params["head"], batch["labels"]), jnp.float32(len(x)), {}

    return Stages(num_layers, lambda params, batch, rng, train, axis: batch["x"], scan, last or sums)


def task(stated=L, axes=("layers", "embed", None), extra=lambda key: {}, last=None, **changes):
    """A task function of L layers, `stated` of them said to be there."""

    def make(config, placement):
        def init(rng):
            layers = {"w": Boxed(0.3 * jax.random.normal(rng, (L, D, D)), axes)}
            return {
                "layers": layers,
                "head": Boxed(0.3 * jax.random.normal(rng, (D, C)), ("embed", None)),
                **extra(rng),
            }

        entries = {"x": Entry((B, D), jnp.float32, ("batch", None)), "labels": Entry((B,), jnp.int32, ("batch",))}
        own = Task(init, loss_of_stages(stages(stated, last)), entries, stages=stages(stated, last), unit="rows")
        return dataclasses.replace(own, takes_manual_axes=True, **changes)

    return make


def example(number):
    rng = np.random.default_rng(number)
    return {"x": rng.normal(size=D).astype(np.float32), "labels": np.int32(number % C)}


def data(config):
    return Dataset([example(i) for i in range(64)], [example(i) for i in range(16)], "1")


def trained(directory, make, *, num_steps=2, make_data=data, **values):
    """What a run returns, with fields of the configuration by their keys, `__` for a dot."""
    config = meshtrain.default()
    config.batch_size, config.num_steps, config.log_every, config.observe.tensorboard = B, num_steps, 1, False
    config.learning_rate.name, config.learning_rate.warmup_steps, config.eval_every = "constant", 0, 0
    for key, value in values.items():
        *groups, name = key.split("__")
        at = config
        for group in groups:
            at = at[group]
        at[name] = value
    return meshtrain.train(config, directory, make, make_data)


def refusal(directory, make, **values):
    with pytest.raises(UserError) as caught:
        trained(directory, make, **values)
    assert not directory.exists(), "nothing is written"
    return "\n".join(caught.value.problems)


@pytest.mark.parametrize("wrong", [{"axes": (None, "embed", None)}, {"axes": ("embed", None, None)}, {"stated": L + 1}])
def test_a_pipeline_takes_only_weights_that_stack_all_layers(tmp_path, wrong):
    said = refusal(tmp_path / "run", task(**wrong), mesh__pipeline=2)
    axes, stated = wrong.get("axes", ("layers", "embed", None)), wrong.get("stated", L)
    assert said.startswith(
        f"Task.stages: got layers/w of shape {(L, D, D)} with axes {axes}, but num_layers = {stated}; allowed: "
    )


def test_a_pipeline_needs_the_key_of_the_layers(tmp_path):
    def make(config, placement):
        plain = task()(config, placement)
        return dataclasses.replace(plain, init=lambda rng: {"blocks": plain.init(rng)["layers"]})

    said = refusal(tmp_path / "run", make, mesh__pipeline=2)
    assert said.startswith("Task.stages: got parameters with the keys blocks; allowed: ")


def clipped(options, rates, axes):
    return optax.chain(optax.scale_by_adam(), optax.clip_by_block_rms(0.5), optax.scale_by_learning_rate(rates))


def adam(options, rates, axes):
    return optax.adam(rates)


adam.elementwise = True


def test_an_optimizer_that_reads_whole_arrays_is_refused_where_they_have_empty_places(tmp_path):
    said = refusal(tmp_path / "run", task(), mesh__pipeline=2, optimizer__name=f"{HERE}:clipped")
    assert said.startswith(f"optimizer.name: got '{HERE}:clipped', but this pipeline stores 3 layers as [4], ")
    assert "; nearest: clipped.elementwise = True if it is elementwise, " in said
    losses = [
        trained(tmp_path / str(size), task(), mesh__pipeline=size, optimizer__name=f"{HERE}:adam").values["loss"]
        for size in (1, 2)
    ]
    np.testing.assert_allclose(*losses, rtol=1e-6)


def noisy(options, rates, axes):
    return optax.chain(optax.add_noise(0.1, 0.5, 1), optax.sgd(rates))


def test_a_random_key_in_an_optimizers_state_is_saved_and_read(tmp_path):
    whole = trained(tmp_path / "whole", task(), num_steps=4, optimizer__name=f"{HERE}:noisy")
    trained(tmp_path / "parts", task(), num_steps=2, optimizer__name=f"{HERE}:noisy")
    parts = trained(tmp_path / "parts", task(), num_steps=4, optimizer__name=f"{HERE}:noisy", mesh__fsdp=2)
    np.testing.assert_allclose(parts.values["loss"], whole.values["loss"], rtol=1e-5)


def rate_without_end(options):
    return lambda count: jnp.where(count < 3, 1.0, jnp.nan)


def diverging(options, rates, axes):
    later = optax.scale_by_schedule(lambda count: jnp.where(count < 3, 1.0, jnp.nan))
    return optax.chain(later, optax.scale_by_learning_rate(rates))


def halved(params, metrics):
    head = params["head"] / 2
    return {**params, "head": jnp.where(jnp.abs(head).max() < 0.06, jnp.nan, head)}


@pytest.mark.parametrize(
    ("own", "changes"),
    [
        ({"learning_rate__name": f"{HERE}:rate_without_end"}, {}),
        ({"optimizer__name": f"{HERE}:diverging"}, {}),
        ({}, {"after_update": halved}),
    ],
    ids=["rate", "optimizer", "after"],
)
def test_an_update_that_is_not_finite_changes_no_weight(tmp_path, own, changes):
    said = "not finite: the learning rate, an update of the optimizer, or the result of Task.after_update; last good "
    with pytest.raises(TrainingStopped, match=said):
        trained(tmp_path, task(**changes), num_steps=20, checkpoint__every=1, checkpoint__keep_last=1, **own)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["3"]


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.bool_, jnp.complex64])
@pytest.mark.parametrize("where", ["Task.loss", "Task.stages.last"])
def test_sums_are_float32(tmp_path, dtype, where):
    def last(params, x, batch, axis):
        value = nll(x, params["head"], batch["labels"])
        return value, jnp.float32(len(x)), {"own": value.astype(dtype)}

    size = 1 if where == "Task.loss" else L
    said = refusal_while_traced(tmp_path / "run", task(last=last), mesh__pipeline=size)
    assert said.startswith(f"{where}: got ")
    assert f"{jnp.dtype(dtype).name}[]" in said


def refusal_while_traced(directory, make, **values):
    with pytest.raises(UserError) as caught:
        trained(directory, make, **values)
    return str(caught.value)


@pytest.mark.parametrize("name", ["loss", "eval_loss", "step_seconds", "rows", 7])
def test_a_metric_has_no_name_of_the_programs_own(tmp_path, name):
    last = lambda params, x, batch, axis: (nll(x, params["head"], batch["labels"]), jnp.float32(1), {name: x[0, 0]})  # noqa: E731
    assert refusal_while_traced(tmp_path / "run", task(last=last)).startswith(f"Task.loss: got the metric {name!r}; ")


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        (
            {"a.b": jnp.ones(2), "a": {"b": jnp.ones(2)}},
            "parameters: got a/b and a.b, which have the same name in a checkpoint; ",
        ),
        (
            {"a/b": jnp.ones(2), "a": {"b": jnp.ones(2)}},
            "parameters: got a/b and a/b, which have the same name in a checkpoint; ",
        ),
        ({"unused": jnp.ones((0, D))}, f"parameters: got unused of shape (0, {D}), without elements; "),
        ({"count": jnp.int32(1)}, "parameters: got count of int32, which has no gradient; "),
    ],
    ids=["dot", "slash", "empty", "integer"],
)
def test_weights_can_be_saved_and_trained(tmp_path, extra, said):
    assert refusal(tmp_path / "run", task(extra=lambda key: extra)).startswith(said)


def test_a_task_function_returns_a_task(tmp_path):
    said = refusal(tmp_path / "run", lambda config, placement: None)
    assert "which returns NoneType; allowed: a Task; nearest: " in said


WIDTH = {"hidden": 4}


def init_of_a_notebook(rng):
    return {"in": jax.random.normal(rng, (D, WIDTH["hidden"])), "head": jax.random.normal(rng, (WIDTH["hidden"], C))}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"batch": None}, "Task.batch: got NoneType; allowed: a dict; "),
        (
            {"batch": {"x": 3}},
            r"Task.batch: got {'x': 3}; allowed: strings as keys, and values with a shape and a dtype",
        ),
        ({"batch": {3: Entry((B,), jnp.int32, ("batch",))}}, "Task.batch: got {3: Entry.*}; allowed: strings as keys"),
        ({"batch": {"x": Entry((B,), "flot", ("batch",))}}, "Task.batch: got {'x': .*'flot'.*}; allowed: strings as"),
        ({"stages": 3}, "Task.stages: got int; allowed: Stages or None; nearest: leave it out"),
        ({"logits": 3}, "Task.logits: got int; allowed: a function or None; nearest: leave it out"),
        ({"init": 3, "unit": None}, "Task.init: got int; .*\nTask.unit: got NoneType; allowed: a text; "),
        ({"higher_is_better": "accuracy"}, "Task.higher_is_better: got str; allowed: a tuple or a list; "),
    ],
)
def test_each_attribute_of_a_task_is_of_its_kind(tmp_path, changes, said):
    with pytest.raises(UserError, match=said):
        trained(tmp_path, task(**changes))


@pytest.mark.parametrize("returned", [None, "a line", [3]], ids=str)
def test_a_check_returns_lines(tmp_path, returned):
    def make(config, placement):
        return task()(config, placement)

    make.check = lambda config, mesh_shape: returned
    with pytest.raises(UserError, match=r"^task: got '.*make', whose check returns .*; allowed: a list of texts"):
        trained(tmp_path, make)


def test_an_init_is_traced_anew_for_each_run(tmp_path, monkeypatch):
    def make(config, placement):
        loss = lambda p, batch, rng, train: (  # noqa: E731
            nll(batch["x"] @ p["in"], p["head"], batch["labels"]), jnp.float32(B), {}
        )  # fmt: skip
        return Task(init_of_a_notebook, loss, dict(task()(config, placement).batch), unit="rows")

    for width in (4, 8):
        monkeypatch.setitem(WIDTH, "hidden", width)
        found = trained(tmp_path / str(width), make)
        assert found.assembly.task.num_parameters == (D + C) * width


def test_layers_below_one_key_may_be_stacks_of_several_lengths(tmp_path):
    def make(config, placement):
        def init(rng):
            stack = lambda n: {"w": Boxed(0.1 * jax.random.normal(rng, (n, D, D)), ("layers", "embed", None))}  # noqa: E731
            return {"model": {"encoder": stack(3), "decoder": stack(2)}, "head": jax.random.normal(rng, (D, C))}

        def loss(params, batch, rng, train):
            x = batch["x"]
            for part in params["model"].values():
                x, _ = scan(part, x, batch, rng, 0, train)
            return nll(x, params["head"], batch["labels"]), jnp.float32(B), {}

        return Task(init, loss, dict(task()(config, placement).batch), unit="rows")

    trained(tmp_path, make, observe__layers="norms")
    assert "grad_norm_of/model/layers of 3" in (tmp_path / "metrics.jsonl").read_text()


@dataclasses.dataclass
class Lazy:
    """Examples of which the later ones may have another shape."""

    wrong_from: int

    def __len__(self):
        return 640

    def __getitem__(self, number):
        return {**example(number), "x": np.zeros(D + (number >= self.wrong_from), np.float32)}


def test_a_batch_that_cannot_be_read_ends_the_run_with_its_state_saved(tmp_path, capsys):
    source = Lazy(600)
    own = lambda config: Dataset(source, [], "1")  # noqa: E731
    with pytest.raises(UserError, match=rf"^example \d+: got \[{D + 1}\] float32 for 'x'"):
        trained(tmp_path, task(), make_data=own, num_steps=40)
    [said] = [line for line in capsys.readouterr().out.splitlines() if line.startswith("saved at step ")]
    [saved] = [path.name for path in (tmp_path / "checkpoints").iterdir()]
    assert said == f"saved at step {saved}: the batch of step {int(saved) + 1} cannot be read"
    source.wrong_from = 640
    trained(tmp_path, task(), make_data=own, num_steps=40)
    steps = [
        json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines() if "loss" in line
    ]
    assert steps == list(range(1, 41))


def test_too_few_layers_are_those_of_the_stages(tmp_path):
    said = refusal(tmp_path / "run", task(), mesh__pipeline=4)
    assert said.startswith("Task.stages.num_layers: got 3, so that a stage of mesh.pipeline 4 ")


class Taking:
    """A tracker that takes values out of the rows that it is given."""

    def __init__(self, options, directory, resume_step):
        self.seen = []

    def write(self, step, values):
        self.seen.append(values.pop("eval_loss", None))

    def close(self):
        pass


def test_a_tracker_may_change_its_rows(tmp_path):
    found = trained(tmp_path, task(), eval_every=1, observe__tracker=f"{HERE}:Taking", early_stop__patience=5)
    assert "eval_loss" in found.values


def test_a_module_that_exits_is_a_line(tmp_path, monkeypatch):
    (tmp_path / "exiting.py").write_text("import sys\nsys.exit(0)\n")
    monkeypatch.syspath_prepend(tmp_path)
    said = refusal(tmp_path / "run", task(), optimizer__name="exiting:rate")
    assert "optimizer.name: got 'exiting:rate', but exiting cannot be imported: SystemExit" in said
