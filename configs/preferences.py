"""Preferences (DPO): which of two answers to "7203 sorted: " is correct, "0237" or another answer.

Purpose: preference losses with pairs, a policy and its frozen reference, rewards and accuracy, on any mesh.
Parameters: 0.79 M, half of them in the frozen reference.
Expected: in at least 95 % of held-out pairs, the correct answer has the larger reward (`eval_accuracy`) after 200
  steps. The model starts from random weights, so it learns to judge answers, not to write them.
Time: half a minute on 2 idle CPU cores.
Hardware: one CPU; any mesh of up to 8 simulated devices by `--config.mesh...`.
Command: python -m meshtrain train --config=configs/preferences.py
"""

import ml_collections

from meshtrain.config import default


def get_config() -> ml_collections.ConfigDict:
    """Returns the configuration."""
    config = default("preferences")
    config.num_steps = 200
    config.batch_size = 32
    config.sequence_length = 64
    config.eval_every = 50
    config.num_eval_batches = 0
    config.log_every = 100
    config.sample_tokens = 0
    config.model.num_layers = 2
    config.model.embed_dim = 128
    config.model.mlp_dim = 256
    config.model.num_heads = 4
    config.model.num_kv_heads = 4
    config.model.dropout_rate = 0.0
    config.data.source = "preferences"
    config.learning_rate.peak = 1e-3
    config.learning_rate.warmup_steps = 20
    return config
