"""DeepSeek-V3 (DeepSeek-AI 2024): latent attention, 256 experts in each layer except the first three; 2,048 GPUs.

Purpose: 32 experts of a layer on each GPU of a host, weights in 512 shards; 33.6 M tokens a step.
Parameters: 671,026,419,200 (671.0 B), of which 37,552,297,472 (37.6 B) are active for a token.
Expected: not known, because it was never run on this cluster; each device's memory is computed from shapes.
Time: not known.
Hardware: 2,048 GPUs of 80 GB, or 256 with --config.mesh.data=1 --config.mesh.fsdp=32 --config.batch_size=4096
  --config.accumulation_steps=16 --config.optimizer.moments=bfloat16.
Data: synthetic. To use your own token files (`python -m meshtrain prepare`), add
  --config.data.source=tokens --config.data.path='TOKENS/*.bin'
Command: python -m meshtrain train --config=configs/deepseek_v3.py
"""

import ml_collections

from meshtrain.config import default


def get_config() -> ml_collections.ConfigDict:
    """Returns the configuration."""
    config = default()
    config.mesh.data = 4
    config.mesh.fsdp = 64
    config.mesh.expert = 8
    config.num_steps = 100_000
    config.batch_size = 8192
    config.sequence_length = 4096
    config.eval_every = 1000
    config.remat.policy = "full"
    config.model.num_layers = 61
    config.model.embed_dim = 7168
    config.model.num_heads = 128
    config.model.num_kv_heads = 128
    config.model.head_dim = 128
    config.model.latent.dim = 512
    config.model.latent.query_dim = 1536
    config.model.latent.rope_dim = 64
    config.model.latent.value_dim = 128
    config.model.vocab_size = 129280
    config.model.norm.epsilon = 1e-6
    config.model.moe.num_experts = 256
    config.model.moe.experts_per_token = 8
    config.model.moe.expert_dim = 2048
    config.model.moe.shared_experts = 1
    config.model.moe.dense_layers = 3
    config.model.moe.dense_dim = 18432
    config.model.moe.router = "sigmoid"
    config.model.moe.router_groups = 8
    config.model.moe.groups_per_token = 4
    config.model.moe.router_scale = 2.5
    # 0.0001 in the paper, for a sum over the 58 layers with experts of a loss divided by the 8 experts of a token.
    config.model.moe.balance_weight = 0.0001 * 58 / 8
    config.model.moe.z_weight = 0.0
    # cuDNN's kernel does not support documents; JAX's kernel does, but was half as fast on an H100.
    config.model.within_documents = False
    config.learning_rate.peak = 2.2e-4
    config.learning_rate.warmup_steps = 2000
    config.precision.policy = "bfloat16"
    config.precision.reduce_dtype = "bfloat16"
    config.optimizer.beta2 = 0.95
    config.optimizer.weight_decay = 0.1
    config.optimizer.clip_norm = 1.0
    config.data.source = "synthetic"
    config.checkpoint.every = 1000
    return config
