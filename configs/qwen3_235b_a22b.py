"""Qwen3-235B-A22B (Yang et al. 2025): 128 experts in each layer, eight of them for each token; 512 GPUs.

Purpose: 16 experts of a layer on each GPU of a host, weights in 512 shards; 8.4 M tokens a step.
Parameters: 235,093,634,560 (235.1 B), of which 22,190,763,520 (22.2 B) are active for a token.
Expected: not known, because it was never run on this cluster; each device's memory is computed from shapes.
Time: not known.
Hardware: 512 GPUs of 80 GB.
Data: synthetic. To use your own token files (`python -m meshtrain prepare`), add
  --config.data.source=tokens --config.data.path='TOKENS/*.bin'
Command: python -m meshtrain train --config=configs/qwen3_235b_a22b.py
"""

import ml_collections

from meshtrain.config import default


def get_config() -> ml_collections.ConfigDict:
    """Returns the configuration."""
    config = default()
    config.mesh.fsdp = 64
    config.mesh.expert = 8
    config.num_steps = 100_000
    config.batch_size = 2048
    config.sequence_length = 4096
    config.eval_every = 1000
    config.remat.policy = "save_attention"
    config.model.num_layers = 94
    config.model.embed_dim = 4096
    config.model.moe.num_experts = 128
    config.model.moe.experts_per_token = 8
    config.model.moe.expert_dim = 1536
    config.model.num_heads = 64
    config.model.num_kv_heads = 4
    config.model.head_dim = 128
    config.model.vocab_size = 151936
    config.model.rope.base = 1_000_000.0
    config.model.norm.epsilon = 1e-6
    config.model.norm.qk = True
    config.model.moe.balance_weight = 0.001
    config.model.moe.z_weight = 0.0
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
