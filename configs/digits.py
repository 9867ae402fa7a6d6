"""Handwritten digits: a convolutional classifier of 1,797 images of 8 x 8 pixels, included in the package.

Purpose: a task without text in the same program, on any mesh of data, fsdp and tensor.
Parameters: 0.15 M.
Expected: at least 98 % of 359 held-out digits correct after 300 steps.
Time: half a minute on 2 CPU cores.
Hardware: one CPU; any mesh of up to 8 simulated devices by `--config.mesh...`.
Command: python -m meshtrain train --config=configs/digits.py
"""

import ml_collections

from meshtrain.config import default


def get_config() -> ml_collections.ConfigDict:
    """Returns the configuration."""
    config = default(task="convnet")
    config.num_steps = 300
    config.batch_size = 128
    config.eval_every = 100
    config.num_eval_batches = 0
    config.learning_rate.peak = 3e-3
    config.learning_rate.warmup_steps = 20
    config.data.source = "digits"
    config.data.validation_fraction = 0.2
    return config
