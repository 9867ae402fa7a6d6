"""Megatron-Turing NLG 530B (Smith et al. 2022): data 16 x pipeline 35 x tensor 8.

Purpose: three chunks of one layer on each of 35 stages, 140 microbatches; 4.6 M tokens a step.
Parameters: 529,581,506,560 (529.6 B).
Expected: not known, because it was never run on this cluster; each device's memory is computed from shapes.
Time: not known.
Hardware: 4,480 A100 of 80 GB.
Data: synthetic. To use your own token files (`python -m meshtrain prepare`), add
  --config.data.source=tokens --config.data.path='TOKENS/*.bin'
Command: python -m meshtrain train --config=configs/mtnlg_530b.py
"""

import ml_collections

from meshtrain.config import default


def get_config() -> ml_collections.ConfigDict:
    """Returns the configuration."""
    config = default()
    config.mesh.data = 16
    config.mesh.pipeline = 35
    config.mesh.tensor = 8
    config.layout.sequence_parallel = True
    config.pipeline.schedule = "interleaved_1f1b"
    # Interleaving needs a multiple of 35 microbatches. The paper's batch, 1,920, is not a multiple of 16 x 35.
    config.pipeline.num_microbatches = 140
    config.pipeline.num_chunks = 3
    config.num_steps = 58_855
    config.batch_size = 2240
    config.sequence_length = 2048
    config.eval_every = 1000
    config.remat.policy = "selective"
    config.model.num_layers = 105
    config.model.embed_dim = 20480
    config.model.mlp_dim = 81920
    config.model.num_heads = 128
    config.model.num_kv_heads = 128
    # The vocabulary is split over 35 stages x 8 tensor devices.
    config.model.vocab_multiple = 280
    config.model.init_std = 4e-3
    config.model.vocab_size = 50257
    config.model.positions = "learned"
    config.model.norm.name = "layernorm"
    config.model.activation = "gelu"
    config.model.tied_embeddings = True
    config.model.biases = True
    # As in the original, tokens attend to preceding documents, so attention needs only the causal mask.
    config.model.within_documents = False
    config.learning_rate.peak = 5e-5
    config.learning_rate.warmup_steps = 250
    config.precision.policy = "bfloat16"
    config.precision.reduce_dtype = "bfloat16"
    config.optimizer.beta2 = 0.95
    config.optimizer.weight_decay = 0.1
    config.optimizer.clip_norm = 1.0
    config.data.source = "synthetic"
    config.checkpoint.every = 1000
    return config
