"""Tensor parallelism: every device computes one eighth of each layer's heads, mlp and vocabulary.

Purpose: column-parallel, then row-parallel weights, with norms and residuals split along the sequence.
Parameters: 1.12 M.
Expected: a validation loss near 2.17 nats a byte (Python 3.11); the 8 heads are half as wide as in configs/3d.py.
Time: a few minutes on 2 CPU cores.
Hardware: 8 devices; on a CPU they are simulated.
Command: python -m meshtrain train --config=configs/tensor.py
"""

import ml_collections

from meshtrain.config import default


def get_config() -> ml_collections.ConfigDict:
    """Returns the configuration: the default small decoder on source text."""
    config = default()
    config.mesh.tensor = 8
    config.layout.sequence_parallel = True
    config.model.num_heads = 8
    config.model.num_kv_heads = 8
    config.num_steps = 100
    config.learning_rate.peak = 3e-3
    config.learning_rate.warmup_steps = 20
    return config
