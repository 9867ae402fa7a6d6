"""Hybrid sharding: two copies of the weights, each in four shards.

Purpose: weights are gathered among four neighbours, and only gradients are sent between the copies.
Parameters: 1.12 M.
Expected: the losses of configs/3d.py up to rounding, because model, data, seed and steps are the same.
Time: a few minutes on 2 CPU cores.
Hardware: 8 devices; on a CPU they are simulated.
Command: python -m meshtrain train --config=configs/hybrid.py
"""

import ml_collections

from meshtrain.config import default


def get_config() -> ml_collections.ConfigDict:
    """Returns the configuration: the default small decoder on source text."""
    config = default()
    config.mesh.data = 2
    config.mesh.fsdp = 4
    config.num_steps = 100
    config.learning_rate.peak = 3e-3
    config.learning_rate.warmup_steps = 20
    return config
