"""The options of the convolutional classifier, without Flax NNX, which takes a tenth of a second to import."""

import dataclasses

from meshtrain.words.options import option


@dataclasses.dataclass(frozen=True)
class ConvnetOptions:
    """The options of the task `convnet`."""

    height: int = option(8, "pixels of an image from top to bottom", minimum=2)
    width: int = option(8, "pixels of an image from left to right", minimum=2)
    channels: int = option(1, "numbers a pixel: 1 for grey, 3 for colours", minimum=1)
    num_classes: int = option(10, "labels are 0 to below this", minimum=2)
    filters: int = option(32, "filters of the first convolution, half of the second's", minimum=1, dim="filters")
    hidden: int = option(128, "width of the dense layer", minimum=1, dim="mlp")
    num_groups: int = option(8, "groups of channels that GroupNorm normalizes together", minimum=1)
    dropout_rate: float = option(0.25, "share of activations set to zero in training, 0 to below 1", minimum=0)
    max_shift: int = option(1, "most pixels by which training shifts an image, in each direction; 0: none", minimum=0)
