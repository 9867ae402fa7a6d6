"""Llama 3 8B (Grattafiori et al. 2024) on 64 GPUs: 8 copies of the weights, each in 8 shards.

Purpose: a copy of the weights on each host, so that they are gathered inside a host; 4.2 M tokens a step.
Parameters: 8,030,261,248 (8.03 B).
Expected: not known, because it was never run on this cluster; each device's memory is computed from shapes.
Time: not known.
Hardware: 64 GPUs of 80 GB.
Data: synthetic. To use your own token files (`python -m meshtrain prepare`), add
  --config.data.source=tokens --config.data.path='TOKENS/*.bin'
Command: python -m meshtrain train --config=configs/llama3_8b.py
"""

import ml_collections

from meshtrain.config import default


def get_config() -> ml_collections.ConfigDict:
    """Returns the configuration."""
    config = default()
    config.mesh.data = 8
    config.mesh.fsdp = 8
    config.num_steps = 100_000
    config.batch_size = 512
    config.sequence_length = 8192
    config.accumulation_steps = 4
    config.eval_every = 1000
    config.remat.policy = "full"
    config.model.num_layers = 32
    config.model.embed_dim = 4096
    config.model.mlp_dim = 14336
    config.model.num_heads = 32
    config.model.num_kv_heads = 8
    config.model.vocab_size = 128256
    config.model.rope.base = 500_000.0
    # cuDNN's kernel does not support documents; JAX's kernel does, but was half as fast on an H100.
    config.model.within_documents = False
    config.learning_rate.peak = 3e-4
    config.learning_rate.warmup_steps = 2000
    config.precision.policy = "bfloat16"
    config.precision.reduce_dtype = "bfloat16"
    config.optimizer.beta2 = 0.95
    config.optimizer.weight_decay = 0.1
    config.optimizer.clip_norm = 1.0
    config.data.source = "synthetic"
    config.checkpoint.every = 1000
    return config
