"""Llama 3 70B (Grattafiori et al. 2024), fully sharded over 2,048 A100s.

Purpose: one sequence on each device, weights in 2,048 shards; 16.8 M tokens a step.
Parameters: 70,553,706,496 (70.55 B).
Expected: not known, because it was never run on this cluster; each device's memory is computed from shapes.
Time: not known.
Hardware: 2,048 A100 of 80 GB.
Data: synthetic. To use your own token files (`python -m meshtrain prepare`), add
  --config.data.source=tokens --config.data.path='TOKENS/*.bin'
Command: python -m meshtrain train --config=configs/llama3_70b.py
"""

import ml_collections

from meshtrain.config import default


def get_config() -> ml_collections.ConfigDict:
    """Returns the configuration."""
    config = default()
    config.mesh.fsdp = 2048
    config.num_steps = 100_000
    config.batch_size = 2048
    config.sequence_length = 8192
    config.eval_every = 1000
    config.remat.policy = "full"
    config.model.num_layers = 80
    config.model.embed_dim = 8192
    config.model.mlp_dim = 28672
    config.model.num_heads = 64
    config.model.num_kv_heads = 8
    config.model.vocab_size = 128256
    config.model.rope.base = 500_000.0
    # cuDNN's kernel does not support documents; JAX's kernel does, but was half as fast on an H100.
    config.model.within_documents = False
    config.learning_rate.peak = 1.5e-4
    config.learning_rate.warmup_steps = 2000
    config.precision.policy = "bfloat16"
    config.precision.reduce_dtype = "bfloat16"
    config.optimizer.beta2 = 0.95
    config.optimizer.weight_decay = 0.1
    config.optimizer.clip_norm = 1.0
    config.data.source = "synthetic"
    config.checkpoint.every = 1000
    return config
