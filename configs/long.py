"""Sequences of 4,096 bytes, each split over four devices: context 4 x fsdp 2, on the standard library's source text.

Purpose: the context axis, on any machine. `scripts/bench windows` trains this model and then reads
  validation text in windows of 4,096 bytes and of 256 (docs/results/training.md).
Parameters: 0.16 M.
Expected: a validation loss near 1.86 nats a byte, and 1.87 in windows of 256.
Time: less than three minutes on 2 CPU cores.
Hardware: 8 devices; on a CPU they are simulated.
Command: python -m meshtrain train --config=configs/long.py
"""

import ml_collections

from meshtrain.config import default


def get_config() -> ml_collections.ConfigDict:
    """Returns the configuration."""
    config = default()
    config.mesh.context = 4
    config.mesh.fsdp = 2
    config.num_steps = 130
    config.batch_size = 2
    config.sequence_length = 4096
    config.model.num_layers = 2
    config.model.embed_dim = 64
    config.model.mlp_dim = 256
    config.model.num_heads = 4
    config.model.num_kv_heads = 4
    config.model.window = 32
    config.model.global_every = 2
    config.model.norm.qk = True
    config.optimizer.name = "muon"
    config.learning_rate.name = "linear"
    config.learning_rate.peak = 0.02
    config.learning_rate.warmup_steps = 10
    return config
