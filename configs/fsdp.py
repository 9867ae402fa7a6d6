"""Fully sharded data parallelism: every device stores one eighth of the weights and of the optimizer's state.

Purpose: weights are gathered when a layer needs them; gradients are reduce-scattered to the weights' shards.
Parameters: 1.12 M.
Expected: the losses of configs/3d.py up to rounding, because model, data, seed and steps are the same.
Time: a few minutes on 2 CPU cores.
Hardware: 8 devices; on a CPU they are simulated.
Command: python -m meshtrain train --config=configs/fsdp.py
"""

import ml_collections

from meshtrain.config import default


def get_config() -> ml_collections.ConfigDict:
    """Returns the configuration: the default small decoder on source text."""
    config = default()
    config.mesh.fsdp = 8
    config.num_steps = 100
    config.learning_rate.peak = 3e-3
    config.learning_rate.warmup_steps = 20
    return config
