"""Llama 3 405B (Grattafiori et al. 2024): data 64 x pipeline 14 x tensor 8.

Purpose: nine chunks of one layer on each of 14 stages, so that the pipeline needs no padding layers;
  ZeRO level 1; 14.7 M tokens a step.
Parameters: 405,853,388,800 (405.9 B).
Expected: not known, because it was never run on this cluster; each device's memory is computed from shapes.
Time: not known.
Hardware: 7,168 H100 of 80 GB.
Data: synthetic. To use your own token files (`python -m meshtrain prepare`), add
  --config.data.source=tokens --config.data.path='TOKENS/*.bin'
Command: python -m meshtrain train --config=configs/llama3_405b.py
"""

import ml_collections

from meshtrain.config import default


def get_config() -> ml_collections.ConfigDict:
    """Returns the configuration."""
    config = default()
    config.mesh.data = 64
    config.mesh.pipeline = 14
    config.mesh.tensor = 8
    config.layout.sequence_parallel = True
    config.zero.level = 1
    config.pipeline.schedule = "interleaved_1f1b"
    config.pipeline.num_microbatches = 28
    config.pipeline.num_chunks = 9
    config.num_steps = 1_062_000
    config.batch_size = 1792
    config.sequence_length = 8192
    config.eval_every = 1000
    # A stage stores the residuals of up to 126 layers. With `selective` they do not fit.
    config.remat.policy = "save_attention"
    config.model.num_layers = 126
    config.model.embed_dim = 16384
    config.model.mlp_dim = 53248
    config.model.num_heads = 128
    config.model.num_kv_heads = 8
    # The vocabulary is split over 14 stages x 8 tensor devices.
    config.model.vocab_multiple = 112
    config.model.vocab_size = 128256
    config.model.rope.base = 500_000.0
    # With a mask for documents, the fused attention kernels would lose their memory advantage.
    config.model.within_documents = False
    config.learning_rate.peak = 8e-5
    config.learning_rate.warmup_steps = 8000
    config.precision.policy = "bfloat16"
    config.precision.reduce_dtype = "bfloat16"
    config.optimizer.beta2 = 0.95
    config.optimizer.weight_decay = 0.1
    config.optimizer.clip_norm = 1.0
    config.data.source = "synthetic"
    config.checkpoint.every = 1000
    return config
