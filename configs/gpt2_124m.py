"""GPT-2 small (Radford et al. 2019) on one host of 8 GPUs.

Purpose: a model for comparison with other programs; 0.52 M tokens a step, 10 B in all.
Parameters: 124,439,808 (124.4 M).
Expected: not known, because it was never run on this cluster; each device's memory is computed from shapes.
Time: not known.
Hardware: 8 GPUs of 80 GB.
Data: synthetic. To use your own token files (`python -m meshtrain prepare`), add
  --config.data.source=tokens --config.data.path='TOKENS/*.bin'
Command: python -m meshtrain train --config=configs/gpt2_124m.py
"""

import ml_collections

from meshtrain.config import default


def get_config() -> ml_collections.ConfigDict:
    """Returns the configuration."""
    config = default()
    config.mesh.data = 8
    config.num_steps = 19_073
    config.batch_size = 512
    config.sequence_length = 1024
    config.accumulation_steps = 4
    config.remat.unroll = True
    config.eval_every = 500
    config.model.num_layers = 12
    config.model.embed_dim = 768
    config.model.mlp_dim = 3072
    config.model.num_heads = 12
    config.model.num_kv_heads = 12
    config.model.vocab_size = 50257
    config.model.positions = "learned"
    config.model.norm.name = "layernorm"
    config.model.activation = "gelu"
    config.model.tied_embeddings = True
    config.model.biases = True
    # As in the original, tokens attend to preceding documents, so attention needs only the causal mask.
    config.model.within_documents = False
    config.learning_rate.peak = 6e-4
    config.learning_rate.warmup_steps = 700
    config.precision.policy = "bfloat16"
    config.optimizer.beta2 = 0.95
    config.optimizer.weight_decay = 0.1
    config.optimizer.clip_norm = 1.0
    config.data.source = "synthetic"
    config.checkpoint.every = 1000
    return config
