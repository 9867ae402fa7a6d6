"""The smallest useful run: one device, source text as bytes.

Purpose: to test an installation, and to compare meshes. Batch, layers, heads, embed and mlp are divisible by 8, and
  the peak learning rate is low enough for losses on different meshes to agree.
Parameters: 0.56 M.
Expected: below 2.8 nats a byte on validation text after 60 steps (`--config.num_steps=60`); lower after all 200.
Time: a few minutes on 2 CPU cores.
Hardware: one CPU; any mesh of up to 8 simulated devices by `--config.mesh...`.
Command: python -m meshtrain train --config=configs/tiny.py
"""

import ml_collections

from meshtrain.config import default


def get_config() -> ml_collections.ConfigDict:
    """Returns the configuration."""
    config = default()
    config.num_steps = 200
    config.batch_size = 32
    config.sequence_length = 64
    config.model.num_layers = 8
    config.model.embed_dim = 64
    config.model.mlp_dim = 256
    config.model.num_heads = 8
    config.model.num_kv_heads = 8
    config.learning_rate.peak = 3e-3
    config.learning_rate.warmup_steps = 20
    return config
