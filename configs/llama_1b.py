"""A Llama with the shapes of Llama 3.2 1B on one host of 8 GPUs, weights in eight shards.

Purpose: the smallest Llama; 0.52 M tokens a step.
Parameters: 1,235,814,400 (1.24 B).
Expected: not known, because it was never run on this cluster; each device's memory is computed from shapes.
Time: not known.
Hardware: 8 GPUs of 80 GB.
Data: synthetic. To use your own token files (`python -m meshtrain prepare`), add
  --config.data.source=tokens --config.data.path='TOKENS/*.bin'
Command: python -m meshtrain train --config=configs/llama_1b.py
"""

import ml_collections

from meshtrain.config import default


def get_config() -> ml_collections.ConfigDict:
    """Returns the configuration."""
    config = default()
    config.mesh.fsdp = 8
    config.num_steps = 50_000
    config.batch_size = 64
    config.sequence_length = 8192
    config.accumulation_steps = 4
    config.eval_every = 1000
    config.remat.policy = "none"
    config.remat.unroll = True
    config.model.num_layers = 16
    config.model.embed_dim = 2048
    config.model.mlp_dim = 8192
    config.model.num_heads = 32
    config.model.tied_embeddings = True
    config.model.rope.factor = 32.0
    config.model.rope.low = 1.0
    config.model.rope.high = 4.0
    config.model.rope.original_length = 8192
    config.model.num_kv_heads = 8
    config.model.vocab_size = 128256
    config.model.rope.base = 500_000.0
    # cuDNN's kernel does not support documents; JAX's kernel does, but was half as fast on an H100.
    config.model.within_documents = False
    config.learning_rate.peak = 1e-3
    config.learning_rate.warmup_steps = 2000
    config.precision.policy = "bfloat16"
    config.precision.reduce_dtype = "bfloat16"
    config.optimizer.beta2 = 0.95
    config.optimizer.weight_decay = 0.1
    config.optimizer.clip_norm = 1.0
    config.data.source = "synthetic"
    config.checkpoint.every = 1000
    return config
