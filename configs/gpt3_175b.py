"""GPT-3 175B (Brown et al. 2020): data 64 x pipeline 8 x tensor 8.

Purpose: three axes at full size; tensor inside a host, 24 microbatches, six chunks of two layers on each stage.
Parameters: 174,604,259,328 (174.6 B).
Expected: not known, because it was never run on this cluster; each device's memory is computed from shapes.
Time: not known.
Hardware: 4,096 GPUs of 80 GB.
Data: synthetic. To use your own token files (`python -m meshtrain prepare`), add
  --config.data.source=tokens --config.data.path='TOKENS/*.bin'
Command: python -m meshtrain train --config=configs/gpt3_175b.py
"""

import ml_collections

from meshtrain.config import default


def get_config() -> ml_collections.ConfigDict:
    """Returns the configuration."""
    config = default()
    config.mesh.data = 64
    config.mesh.pipeline = 8
    config.mesh.tensor = 8
    config.layout.sequence_parallel = True
    config.pipeline.schedule = "interleaved_1f1b"
    config.pipeline.num_microbatches = 24
    config.pipeline.num_chunks = 6
    config.num_steps = 95_367
    config.batch_size = 1536
    config.sequence_length = 2048
    config.eval_every = 1000
    config.remat.policy = "selective"
    config.model.num_layers = 96
    config.model.embed_dim = 12288
    config.model.mlp_dim = 49152
    config.model.num_heads = 96
    config.model.num_kv_heads = 96
    config.model.vocab_size = 50257
    config.model.positions = "learned"
    config.model.norm.name = "layernorm"
    config.model.activation = "gelu"
    config.model.tied_embeddings = True
    config.model.biases = True
    # As in the original, tokens attend to preceding documents, so attention needs only the causal mask.
    config.model.within_documents = False
    config.learning_rate.peak = 6e-5
    config.learning_rate.warmup_steps = 120
    config.precision.policy = "bfloat16"
    config.precision.reduce_dtype = "bfloat16"
    config.optimizer.beta2 = 0.95
    config.optimizer.weight_decay = 0.1
    config.optimizer.clip_norm = 1.0
    config.data.source = "synthetic"
    config.checkpoint.every = 1000
    return config
