"""A small convolutional image classifier in Flax NNX, and its task; shows that any Flax module can be a task.

b: images in a microbatch, H: height, W: width, C: channels of an image, F: filters, h = H // 2, w = W // 2, M: hidden
width, K: classes.

Normalization is over groups of channels of one image (Wu and He 2018). The statistics of BatchNorm depend on the batch:
results would depend on the mesh and the microbatches, and a state in addition to the weights would be needed.
"""

import dataclasses
import functools
from collections.abc import Mapping

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from meshtrain.config.schema import Config
from meshtrain.config.tasks import BuiltIn, source_problems
from meshtrain.errors import Problem, nearest_divisor
from meshtrain.models.layers import Initializer, dropout
from meshtrain.models.task import Batch, Entry, Loss, Params, Task, sequence_keys
from meshtrain.models.vocabulary import cross_entropy
from meshtrain.options import option
from meshtrain.sharding.named import Named
from meshtrain.sharding.placement import Placement
from meshtrain.step.precision import compute_dtype, in_fp8

# Numbers that are folded into an image's key, so that each use has independent random numbers.
SHIFT, AFTER_POOLING, AFTER_HIDDEN = range(3)
WINDOW = 3  # the size of a convolution's kernel in pixels
IMAGES = ("digits", "idx")  # sources of images


@dataclasses.dataclass(frozen=True)
class ConvnetOptions:
    """The options of the task `convnet`."""

    height: int = option(8, "pixels of an image from top to bottom", minimum=2)
    width: int = option(8, "pixels of an image from left to right", minimum=2)
    channels: int = option(1, "channels of a pixel: 1 for grey, 3 for colours", minimum=1)
    num_classes: int = option(10, "number of classes; labels are 0 to this number minus 1", minimum=2)
    filters: int = option(
        32, "filters of the first convolution; the second has twice as many", minimum=1, dim="filters"
    )
    hidden: int = option(128, "width of the dense layer", minimum=1, dim="mlp")
    num_groups: int = option(8, "groups of channels that GroupNorm normalizes together", minimum=1)
    dropout_rate: float = option(0.25, "share of activations set to zero in training, 0 to below 1", minimum=0)
    max_shift: int = option(1, "maximum shift of training images in each direction, in pixels; 0: none", minimum=0)


class ConvNet(nnx.Module):
    """A classifier of images: two convolutions with GroupNorm, max pooling, a dense layer and the head.

    It maps images [b, H, W, C] (height, width, channels) in the compute dtype to logits [b, K] for K classes. The
    metadata of each weight has the weight's logical axes.
    """

    def __init__(self, options: ConvnetOptions, dtype: DTypeLike, placement: Placement, rngs: nnx.Rngs) -> None:
        """Creates the weights, float32.

        Args:
          options: sizes of images and layers, and dropout.
          dtype: dtype of convolutions and matmuls; norms are computed in float32.
          placement: determines the shardings of activations.
          rngs: random number streams; the stream `params` initializes the weights.
        """
        of, filters = options, options.filters
        self.options, self.placement = options, placement
        conv = functools.partial(nnx.Conv, kernel_size=(WINDOW, WINDOW), use_bias=False, dtype=dtype, rngs=rngs)
        dense = functools.partial(nnx.Linear, dtype=dtype, rngs=rngs)
        ones = nnx.with_metadata(nnx.initializers.ones, axes=("norm",))
        # The fast variance, E[x^2] - E[x]^2, loses precision by cancellation.
        norm = functools.partial(
            nnx.GroupNorm, num_groups=of.num_groups, dtype=jnp.float32, scale_init=ones, bias_init=_zeros("norm"),
            use_fast_variance=False, rngs=rngs,
        )  # fmt: skip
        self.first = conv(of.channels, filters, kernel_init=_he("height", "width", "channels", "filters"))
        self.first_norm = norm(filters)
        self.second = conv(filters, 2 * filters, kernel_init=_he("height", "width", "filters", "channels"))
        self.second_norm = norm(2 * filters)
        features = (of.height // 2) * (of.width // 2) * 2 * filters
        self.hidden = dense(features, of.hidden, kernel_init=_he("embed", "mlp"), bias_init=_zeros("mlp"))
        # Small initial weights, so that the first loss is log K, the loss of random guesses.
        small = nnx.with_metadata(nnx.initializers.normal(0.01), axes=("embed", None))
        self.head = dense(of.hidden, of.num_classes, kernel_init=small, bias_init=_zeros(None))

    def __call__(self, images: jax.Array, keys: jax.Array | None) -> jax.Array:
        """Returns the logits [b, K] of images [b, H, W, C].

        Args:
          images: scaled pixels [b, H, W, C] in the compute dtype.
          keys: a random key for each image's dropout, [b]; None: no dropout.
        """
        rate = self.options.dropout_rate if keys is not None else 0.0
        keys = jnp.zeros((len(images),)) if keys is None else keys
        place = self.placement.activation
        x = nnx.relu(self.first_norm(self.first(images))).astype(images.dtype)
        x = place(x, ("batch", "height", "width", "filters"))
        x = nnx.relu(self.second_norm(self.second(x))).astype(images.dtype)
        x = place(x, ("batch", "height", "width", "channels"))
        x = nnx.max_pool(x, (2, 2), strides=(2, 2))  # [b, h, w, 2 F]
        x = dropout(x, rate, keys, AFTER_POOLING)
        x = nnx.relu(self.hidden(x.reshape(len(x), -1)))  # [b, M]
        x = dropout(place(x, ("batch", "mlp")), rate, keys, AFTER_HIDDEN)
        return self.head(x)


def _he(*axes: str | None) -> Initializer:
    """Returns an initializer for weights before a ReLU (He et al. 2015) that stores these logical axes as metadata."""
    return nnx.with_metadata(nnx.initializers.he_normal(), axes=axes)


def _zeros(*axes: str | None) -> Initializer:
    return nnx.with_metadata(nnx.initializers.zeros, axes=axes)


def convnet(
    options: ConvnetOptions, *, batch_size: int, dtype: DTypeLike = jnp.float32, placement: Placement | None = None
) -> Task:
    """Returns the task of training `ConvNet`, with the cross-entropy of labels as loss and the metric `accuracy`.

    A batch contains `images` uint8 [B, H, W, C], `labels` int32 [B] and `weights` float32 [B], 0 for padding. The
    parameters are the weights of `ConvNet`, under the names of its modules.

    Args:
      options: options of the network, for which `_check` returns no error line.
      batch_size: B, images in a global batch.
      dtype: dtype of convolutions and matmuls; norms, the softmax and the loss are in float32.
      placement: determines the shardings of weights and activations; None for a single device.
    """
    placement = placement or Placement.single_device()
    build = functools.partial(ConvNet, options, dtype, placement)
    graph, abstract = nnx.split(nnx.eval_shape(lambda: build(nnx.Rngs(0))), nnx.Param)
    axes = nnx.to_pure_dict(abstract, lambda leaf: leaf.axes)

    def init(rng: jax.Array) -> Params:
        state = nnx.state(build(nnx.Rngs(params=rng)), nnx.Param)
        return nnx.to_pure_dict(state, lambda leaf: Named(leaf.get_value(), leaf.axes))

    def ready(w: jax.Array, names: tuple[str | None, ...]) -> jax.Array:
        # Cast first, so that the all-gather moves the smaller dtype; norms stay in float32.
        return placement.weight(w if "norm" in names else w.astype(dtype), names)

    def loss(params: Params, batch: Batch, rng: jax.Array, train: bool) -> Loss:
        keys = sequence_keys(rng, batch) if train else None
        images = batch["images"] if keys is None else shift(batch["images"], keys, options.max_shift)
        images = placement.activation(images, ("batch", "height", "width", "channels"))
        network = nnx.merge(graph, jax.tree.map(ready, params, axes))
        logits = network(images.astype(dtype) / 127.5 - 1, keys).astype(jnp.float32)
        labels, weights = batch["labels"], batch["weights"]
        right = jnp.sum((jnp.argmax(logits, axis=-1) == labels) * weights)
        # The loss expects a dim of tokens: an image has one label.
        total = cross_entropy(logits[:, None], labels[:, None], weights[:, None], options.num_classes)
        return total, jnp.sum(weights), {"accuracy": right}

    size = (batch_size, options.height, options.width, options.channels)
    return Task(
        init=init,
        loss=loss,
        batch={
            "images": Entry(size, jnp.uint8, ("batch", "height", "width", "channels")),
            "labels": Entry((batch_size,), jnp.int32, ("batch",), below=options.num_classes),
            "weights": Entry((batch_size,), jnp.float32, ("batch",)),
        },
        flops_per_token=flops_per_image(options),
        takes_manual_axes=True,
        unit="images",
    )


def shift(images: jax.Array, keys: jax.Array, most: int) -> jax.Array:
    """Returns images shifted at random by -most .. most pixels, vertically and horizontally; zeros fill the border.

    Args:
      images: [b, H, W, C], any dtype.
      keys: a random key for each image, [b]; the shift depends only on this key.
      most: maximum shift in pixels; 0 returns the images unchanged.
    """
    if most == 0:
        return images

    def one(image: jax.Array, key: jax.Array) -> jax.Array:
        down, right = jax.random.randint(jax.random.fold_in(key, SHIFT), (2,), 0, 2 * most + 1)
        padded = jnp.pad(image, ((most, most), (most, most), (0, 0)))
        return jax.lax.dynamic_slice(padded, (down, right, 0), image.shape)

    return jax.vmap(one)(images, keys)


def flops_per_image(options: ConvnetOptions) -> float:
    """Returns the model FLOPs of one image's forward and backward pass: 2 for each multiplication by a weight.

    The backward pass has twice the FLOPs of the forward pass, except for the first convolution, whose input needs no
    gradient. A convolution of 3 x 3 multiplies each weight (3 H - 2) (3 W - 2) / 9 times on average for H x W pixels,
    because multiplications of the padding around the image are not counted.
    """
    filters, hidden = options.filters, options.hidden
    places = (WINDOW * options.height - 2) * (WINDOW * options.width - 2)
    features = (options.height // 2) * (options.width // 2) * 2 * filters
    first = places * options.channels * filters
    others = places * filters * 2 * filters + features * hidden + hidden * options.num_classes
    return 2.0 * (2 * first + 3 * others)


def _make(config: Config, placement: Placement) -> Task:
    dtype = compute_dtype(config.precision)
    return convnet(config.model, batch_size=config.batch_size, dtype=dtype, placement=placement)


def _check(config: Config, mesh_shape: Mapping[str, int]) -> list[Problem]:
    """Returns an error line for each conflict between a convnet's options, or between options and data.

    Args:
      config: configuration with `ConvnetOptions` as its model; each field is within its bounds.
      mesh_shape: mesh axis -> size; not used here, because a check for all tasks verifies the supported axes.
    """
    options, problems = config.model, source_problems(config, IMAGES, "images")
    if in_fp8(config.precision):
        problems.append(
            Problem(
                "precision.policy",
                got="fp8 with task=convnet, whose convolutions are not available in 8 bits",
                allowed="float32, bfloat16, float16",
                nearest="precision.policy=bfloat16",
            )
        )
    if options.filters % options.num_groups:
        problems.append(
            Problem(
                "model.num_groups",
                got=options.num_groups,
                allowed=f"a divisor of model.filters = {options.filters}",
                nearest=nearest_divisor(options.filters, options.num_groups),
                depends_on=["model.filters"],
            )
        )
    if options.dropout_rate >= 1:
        problems.append(Problem("model.dropout_rate", got=options.dropout_rate, allowed="0 to below 1", nearest="0.9"))
    most = min(options.height, options.width) - 1
    if options.max_shift > most:
        problems.append(
            Problem(
                "model.max_shift",
                got=options.max_shift,
                allowed=f"0 to {most}, below model.height and model.width",
                nearest=most,
                depends_on=["model.height", "model.width"],
            )
        )
    return problems


built_in = BuiltIn("convnet", _make, ConvnetOptions, _check, unread=("remat", "layout.sequence_parallel"))
