"""A task and data of one's own with batches of rank 4: a linear classifier of images on data 2 x fsdp 2.

B: images, H, W, C: height, width, channels.
"""

import dataclasses
import json
import pathlib

import grain
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.linen import LogicallyPartitioned

from meshtrain import explain, generate
from meshtrain.assembly.assemble import assemble
from meshtrain.config.resolve import resolve
from meshtrain.config.tasks import abstract_task, find
from meshtrain.data.corpus import tokenizer_for
from meshtrain.data.dataset import Dataset
from meshtrain.errors import UserError
from meshtrain.models.task import Entry, Task
from meshtrain.options import option
from meshtrain.run.dataset import open_data
from meshtrain.run.generating import problems_of_task
from meshtrain.sharding.rules import AXES, LayoutOptions, Rule, default_rules, extend
from meshtrain.training import train

H, W, C, CLASSES = 4, 2, 3, 5
GIVEN = {
    "batch_size": 8,
    "num_steps": 6,
    "log_every": 1,
    "num_eval_batches": 0,
    "accumulation_steps": 2,
    "learning_rate": {"name": "constant", "peak": 0.1, "warmup_steps": 0},
    "checkpoint": {"every": 3},
    "observe": {"progress": False},
}
MESH = {"data": 2, "fsdp": 2}


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of the classifier."""

    scale: float = option(1.0, "factor of the images", minimum=0.0)


def classifier(config, placement):
    shape, axes = (H * W * C, CLASSES), ("embed", None)

    def init(rng):
        return {"kernel": LogicallyPartitioned(0.1 * jax.random.normal(rng, shape), axes)}

    def loss(params, batch, rng, train):
        images = placement.activation(batch["images"], ("batch", "height", "width", "channels"))
        flat = config.model.scale * images.reshape(len(images), -1)
        logs = jax.nn.log_softmax(flat @ placement.weight(params["kernel"], axes))
        one = -jnp.take_along_axis(logs, batch["labels"][:, None], axis=1)[:, 0]
        right = (logs.argmax(-1) == batch["labels"]) * batch["weights"]
        return jnp.sum(one * batch["weights"]), batch["weights"].sum(), {"accuracy": right.sum()}

    batch = {
        "images": Entry((config.batch_size, H, W, C), jnp.float32, ("batch", "height", "width", "channels")),
        "labels": Entry((config.batch_size,), jnp.int32, ("batch",), below=CLASSES),
        "weights": Entry((config.batch_size,), jnp.float32, ("batch",)),
    }
    return Task(init, loss, batch, unit="images", flops_per_token=6.0 * H * W * C * CLASSES)


classifier.options = Options


def image(number):
    """An image whose label is the place of its brightest column of numbers, more or less."""
    random = np.random.default_rng(int(number))
    label = np.int32(number % CLASSES)
    pixels = random.normal(size=(H, W, C)).astype(np.float32)
    pixels.reshape(-1)[label] += 3
    return {"images": pixels, "labels": label, "weights": np.float32(1)}


def images(config):
    """22 images to learn from, as a list; 10, which no batch of 8 divides, out of Grain to evaluate."""
    validation = grain.MapDataset.range(100, 110).map(image)
    return Dataset([image(number) for number in range(22)], validation, f"images {config.seed}")


def rows(run: pathlib.Path):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def losses(run: pathlib.Path):
    return {row["step"]: row["loss"] for row in rows(run) if "loss" in row}


@pytest.fixture(scope="module")
def on_one_device(tmp_path_factory):
    run = tmp_path_factory.mktemp("images") / "one"
    return train(GIVEN, run, classifier, images)


def test_a_mesh_and_a_stop_change_no_number(on_one_device, tmp_path, capsys):
    train({**GIVEN, "num_steps": 3, "mesh": MESH}, tmp_path, classifier, images)
    said = capsys.readouterr().out
    assert "22 + 10 examples" in said
    assert "nats" not in said
    assert "bigram" not in said
    result = train({**GIVEN, "mesh": MESH}, tmp_path, classifier, images)
    assert result.assembly.batch["images"].sharding.shard_shape((8, H, W, C)) == (2, H, W, C)
    assert not result.state.params["kernel"].sharding.is_fully_replicated
    alone = losses(on_one_device.directory)
    assert list(alone) == [1, 2, 3, 4, 5, 6]
    np.testing.assert_allclose([losses(tmp_path)[step] for step in alone], list(alone.values()), rtol=1e-5)
    assert alone[6] < alone[1]
    np.testing.assert_allclose(result.values["eval_loss"], on_one_device.values["eval_loss"], rtol=1e-5)


def test_throughput_counts_images(on_one_device):
    last = [row for row in rows(on_one_device.directory) if "loss" in row][-1]
    assert last["images"] == 6 * 8
    assert last["images_per_second"] > 0
    assert last["model_flops_per_second"] == pytest.approx(last["images_per_second"] * 6 * H * W * C * CLASSES)
    assert not {"tokens", "tokens_per_second"} & set(last)


def test_each_image_is_evaluated_once(on_one_device):
    kernel = np.asarray(on_one_device.state.params["kernel"])
    examples = [image(number) for number in range(100, 110)]
    logits = np.stack([example["images"].reshape(-1) for example in examples]) @ kernel
    labels = np.array([example["labels"] for example in examples])
    chosen = logits[np.arange(10), labels] - np.log(np.exp(logits).sum(-1))
    np.testing.assert_allclose(on_one_device.values["eval_loss"], -chosen.mean(), rtol=1e-5)
    np.testing.assert_allclose(on_one_device.values["eval_accuracy"], (logits.argmax(-1) == labels).mean(), rtol=1e-6)


def test_dims_of_a_batch_follow_the_rules():
    config = resolve({**GIVEN, "accumulation_steps": 1}, make_task=classifier)
    shape = dict.fromkeys(AXES, 1) | {"data": 2, "tensor": 2}
    rules = extend(default_rules(LayoutOptions()), Rule("height", activations=("tensor",)))
    batch = assemble(config, shape, jax.devices()[:4], classifier, rules).batch
    assert batch["images"].sharding.shard_shape((8, H, W, C)) == (4, H // 2, W, C)

    def strange(config, placement):
        entry = Entry((8, 3, 3), jnp.float32, ("batch", "hight", "height"))
        return dataclasses.replace(classifier(config, placement), batch={"images": entry, "labels": entry})

    with pytest.raises(UserError) as caught:
        assemble(config, shape, jax.devices()[:4], strange, rules)
    named = [line for line in caught.value.problems if "got 'hight'" in line]
    assert len(named) == 2
    assert "did you mean 'height'?" in named[0]
    assert "sharding.rules.extend" in named[0]
    assert any("dim 2 has size 3" in line for line in caught.value.problems)


@pytest.mark.parametrize(
    "change, said",
    [
        (lambda data: data.train[0].pop("labels"), r"data\.train\[0\]: got no entry 'labels'.*; nearest: add"),
        (lambda data: data.train[0].update(images=np.zeros((H, W))), r"got \[4, 2\] float64 for 'images'; .* float32"),
        (lambda data: data.train[0].update(labels=np.int64(1)), r"nearest: labels\.astype\(np\.int32\)"),
        (lambda data: data.train[0].update(labels=np.int32(-1)), r"got -1 in 'labels'; .*nearest: 0"),
        (lambda data: data.train[3].update(labels=np.int32(CLASSES)), rf"got {CLASSES} in 'labels'; allowed: 0 to"),
        (lambda data: data.train[5].pop("labels"), r"^data\.train\[5\]: got no entry 'labels'"),
        (
            lambda data: dataclasses.replace(data, train=(*data.train, 7)),
            r"^data\.train\[22\]: got int; allowed: a dict",
        ),
        (lambda data: data.train.clear(), r"data\.train: got no example; allowed: at least one"),
        (lambda data: dataclasses.replace(data, fingerprint=""), r"data: got '' for 'fingerprint' of Dataset"),
        (
            lambda data: dataclasses.replace(data, text="words"),
            r"data: got str for 'text' of Dataset; .* a Tokenizer or",
        ),
        (
            lambda data: dataclasses.replace(data, prompts="407"),
            r"data: got '407' for 'prompts' of Dataset; .* list of",
        ),
        (
            lambda data: dataclasses.replace(data, prompts=[""]),
            r"data: got \[''\] for 'prompts' of Dataset; .* nonempty",
        ),
        (lambda data: dataclasses.replace(data, train=iter([])), r"data\.train: got list_iterator; .*a list"),
        (lambda data: dataclasses.replace(data, validation=[3]), r"data\.validation\[0\]: got int; allowed: a dict"),
        (lambda data: {"train": data.train}, r"data: got no value for 'train' of dict"),
    ],
)
def test_data_that_do_not_fit_are_refused_before_anything_is_compiled(change, said, tmp_path):
    def wrong(config):
        data = images(config)
        changed = change(data)
        return changed if isinstance(changed, Dataset) or (type(changed) is dict and "train" in changed) else data

    with pytest.raises(UserError, match=said):
        train(GIVEN, tmp_path, classifier, wrong)
    assert not (tmp_path / "config.json").exists()


def test_zeros_that_a_loss_would_count_are_refused(tmp_path):
    def without_weights(config, placement):
        task = classifier(config, placement)
        return dataclasses.replace(task, batch={name: task.batch[name] for name in ("images", "labels")})

    with pytest.raises(UserError, match=r"data\.validation: got 10 examples in batches of 8, .* nearest: 8 examples"):
        train(GIVEN, tmp_path, without_weights, images)


def test_data_for_other_tasks_are_refused(tmp_path):
    with pytest.raises(UserError, match=r"data\.source=python, an example: got no entry 'images'"):
        train(GIVEN, tmp_path, classifier)
    with pytest.raises(UserError, match=r"make_data: got Rules; .* nearest: train\(\.\.\., rules=rules\)"):
        train(GIVEN, tmp_path, classifier, default_rules(LayoutOptions()))
    with pytest.raises(UserError) as caught:
        train(GIVEN, 3, "decoder", [image(1)], {"mlp": ("tensor",)})
    of_directory, of_task, of_data, of_rules = caught.value.problems
    assert of_directory.startswith("directory: got int; ")
    assert of_task.startswith("make_task: got str; ")
    assert of_task.endswith("nearest: default(task='decoder')")
    assert of_data.startswith("make_data: got list; ")
    assert of_rules.startswith("rules: got dict; ")


def test_text_of_a_task_without_logits_is_refused_for_that(on_one_device):
    with pytest.raises(UserError, match=r"^task: got a task without logits"):
        generate.main([f"--workdir={on_one_device.directory}", f"--config.task={TASK}", f"--config.data.source={DATA}"])


TASK, DATA = f"{__name__}:classifier", f"{__name__}:images"
NAMED = {**GIVEN, "task": TASK, "data": {"source": DATA}}


def test_task_and_data_go_by_name():
    config = resolve(NAMED)
    assert find(config.task) is classifier
    data = open_data(config, abstract_task(config))
    assert (len(data.train), len(data.validation), data.summary) == (22, 10, "22 + 10 examples")
    assembly = assemble(config, dict.fromkeys(AXES, 1), jax.devices()[:1])
    said = explain.text(assembly)
    assert "8 examples of images [4, 2, 3] float32, labels [] int32, weights [] float32; 8 images" in said
    [line] = problems_of_task(assembly)
    assert line.startswith("task: got a task without logits")
    with pytest.raises(UserError, match=r"data\.source: got '.*:images', which has no tokenizer; .*source=python"):
        tokenizer_for(config.data, vocab_size=3)


def test_a_batch_that_a_prompt_does_not_fill_generates_nothing():
    def drawn(config, placement):
        task = classifier(config, placement)
        return dataclasses.replace(task, logits=lambda params, batch: batch["images"])

    assembly = assemble(resolve(NAMED), dict.fromkeys(AXES, 1), jax.devices()[:1], drawn)
    [line] = problems_of_task(assembly)
    assert line.startswith("task: got a batch of images, labels, weights; allowed for generate: 'tokens'")


def test_a_decoder_on_data_of_ones_own_has_to_be_told_its_vocabulary():
    source = {"source": f"{__name__}:images"}
    with pytest.raises(UserError, match=r"^model\.vocab_size: got 0 with data\.source=.*, which has no tokenizer"):
        resolve({"data": source})
    with pytest.raises(UserError, match=r"^model\.vocab_size: got 0.* which has no tokenizer.*; allowed: a number"):
        resolve({"data": source}, reads_data=False)
    assert resolve({"data": source, "model": {"vocab_size": 300}}).model.vocab_size == 300


def test_another_fingerprint_is_another_run(on_one_device):
    def others(config):
        return dataclasses.replace(images(config), fingerprint="others")

    with pytest.raises(UserError, match=r"its run was trained on data with hash images 0"):
        train(GIVEN, on_one_device.directory, classifier, others)
