"""Pipeline parallelism: every device has one layer of eight, and microbatches pass from device to device.

Purpose: 1F1B in one program; memory does not grow with the number of microbatches.
Parameters: 2.17 M.
Expected: a validation loss near 2.15 nats a byte (Python 3.11).
Time: more than twice the time of configs/3d.py, because idle stages compute too on 2 shared CPU cores.
Hardware: 8 devices; on a CPU they are simulated.
Command: python -m meshtrain train --config=configs/pipeline.py
"""

import ml_collections

from meshtrain.config import default


def get_config() -> ml_collections.ConfigDict:
    """Returns the configuration: the default small decoder on source text."""
    config = default()
    config.mesh.pipeline = 8
    config.model.num_layers = 8
    config.pipeline.schedule = "1f1b"
    config.pipeline.num_microbatches = 16
    config.num_steps = 100
    config.learning_rate.peak = 3e-3
    config.learning_rate.warmup_steps = 20
    return config
