"""A custom task with custom data: a Flax Linen network classifies images of three shapes, on data 2 x fsdp 2.

python -m meshtrain train --config=docs/guide/own_images.py   (or explain, plan --cluster=cpu:4, config)
"""

import dataclasses

import grain
import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from ml_collections import ConfigDict

import meshtrain
from meshtrain.config import Config, default
from meshtrain.data.dataset import Dataset
from meshtrain.models.task import Batch, Entry, Loss, Params, Task, sequence_keys
from meshtrain.options import option
from meshtrain.sharding.placement import Placement

SIZE, NUM_TRAIN, NUM_HELD_OUT = 16, 3000, 300


def drawn(number: int) -> dict[str, np.ndarray]:
    """Returns an example: a noisy image that contains a disc, a square or a diamond, and its label."""
    random, label = np.random.default_rng(int(number)), int(number) % 3
    (x, y), radius = random.integers(5, SIZE - 5, 2), random.integers(3, 5)
    across, down = np.abs(np.arange(SIZE) - x)[None, :], np.abs(np.arange(SIZE) - y)[:, None]
    distance = [np.hypot(across, down), np.maximum(across, down), across + down][label]
    pixels = (distance <= radius) + random.normal(0, 0.2, (SIZE, SIZE))
    return {"images": np.float32(pixels)[..., None], "labels": np.int32(label), "weights": np.float32(1)}


def shapes(config: Config) -> Dataset:
    """Returns the data. An example is computed from its index when it is read."""
    examples = grain.MapDataset.range(NUM_TRAIN + NUM_HELD_OUT).map(drawn)
    return Dataset(examples[:NUM_TRAIN], examples[NUM_TRAIN:], fingerprint="shapes 1")


@dataclasses.dataclass(frozen=True)
class Options:
    """The options in `config.model`."""

    filters: int = option(16, "filters of the convolution", minimum=1, dim="filters")
    dropout_rate: float = option(0.1, "share of activations set to zero in training", minimum=0, maximum=0.9)


class Network(nn.Module):
    """Maps an image [16, 16, 1] to three logits; each weight declares logical axes from the table of rules."""

    options: Options

    @nn.compact
    def __call__(self, image: jax.Array, train: bool) -> jax.Array:
        """Returns the logits."""
        start, named = nn.initializers.lecun_normal(), nn.with_logical_partitioning
        ones, zeros = (named(init, ("norm",)) for init in (nn.initializers.ones_init(), nn.initializers.zeros_init()))
        kernel = named(start, ("height", "width", "channels", "filters"))
        x = nn.Conv(self.options.filters, (9, 9), use_bias=False, kernel_init=kernel)(image[None])
        x = nn.relu(nn.GroupNorm(num_groups=4, scale_init=ones, bias_init=zeros)(x))
        x = nn.Dropout(self.options.dropout_rate, deterministic=not train)(nn.max_pool(x, (SIZE, SIZE)))
        return nn.Dense(3, use_bias=False, kernel_init=named(start, ("embed", None)))(x.reshape(-1))


def which_shape(config: Config, placement: Placement) -> Task:
    """Returns the task: classify the shape in an image."""
    network, b = Network(config.model), config.batch_size

    def init(rng: jax.Array) -> Params:
        return network.init(rng, jnp.zeros((SIZE, SIZE, 1)), False)["params"]

    def loss(params: Params, batch: Batch, rng: jax.Array, train: bool) -> Loss:
        def logits(image: jax.Array, key: jax.Array) -> jax.Array:  # of one image, with a separate random key
            return network.apply({"params": params}, image, train, rngs={"dropout": key})

        found = jax.nn.log_softmax(jax.vmap(logits)(batch["images"], sequence_keys(rng, batch)))
        right = (found.argmax(-1) == batch["labels"]) * batch["weights"]
        one = -jnp.take_along_axis(found, batch["labels"][:, None], axis=1)[:, 0]
        return jnp.sum(one * batch["weights"]), batch["weights"].sum(), {"accuracy": right.sum()}

    images = Entry((b, SIZE, SIZE, 1), jnp.float32, ("batch", "height", "width", "channels"))
    labels, weights = Entry((b,), jnp.int32, ("batch",), below=3), Entry((b,), jnp.float32, ("batch",))
    return Task(init, loss, {"images": images, "labels": labels, "weights": weights}, unit="images")


which_shape.options = Options


def get_config() -> ConfigDict:
    """Returns the configuration: this task and these data on a mesh of two axes."""
    config = default(task="docs.guide.own_images:which_shape")
    config.data.source = "docs.guide.own_images:shapes"
    config.mesh.data = config.mesh.fsdp = 2
    config.batch_size, config.num_steps, config.num_eval_batches = 64, 150, 0
    config.learning_rate.peak, config.learning_rate.warmup_steps = 1e-2, 10
    return config


if __name__ == "__main__":
    meshtrain.train(get_config(), "runs/own_images")
