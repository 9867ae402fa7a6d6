"""An encoder-decoder spells numbers: "407" -> "four zero seven".

Purpose: the classic demonstration of an encoder-decoder (Vaswani et al. 2017), complete: two stacks, cross-attention,
  the Noam schedule, float16 with a dynamic loss scale, clipping, and data parallelism on two devices.
Parameters: 0.93 M.
Expected: after training on 900 of the numbers 0 to 999, the other 100 are all spelled correctly (`eval_exact_match` 1).
Time: about 40 seconds on 2 idle CPU cores.
Hardware: 2 devices; on a CPU they are simulated.
Command: python -m meshtrain train --config=configs/numbers.py
  then: python -m meshtrain generate --config=configs/numbers.py --prompt=407
"""

import ml_collections

from meshtrain.config import default


def get_config() -> ml_collections.ConfigDict:
    """Returns the configuration."""
    config = default("seq2seq")
    config.mesh.data = 2
    config.num_steps = 700
    config.batch_size = 16
    config.sequence_length = 32
    config.eval_every = 50
    config.num_eval_batches = 0
    config.log_every = 50
    config.model.num_encoder_layers = 2
    config.model.num_layers = 2
    config.model.embed_dim = 128
    config.model.mlp_dim = 512
    config.model.num_heads = 4
    config.model.dropout_rate = 0.0
    config.model.vocab_multiple = 16
    config.data.source = "numbers"
    config.precision.policy = "float16"
    # With 65,536, the embedding table's gradient (a sum over three uses) overflows at the end of the warm-up.
    config.loss_scale.initial = 16384.0
    config.optimizer.name = "adam"
    # With the paper's 0.98, a batch with a rare kind of number changes the weights too much.
    config.optimizer.beta2 = 0.999
    config.optimizer.epsilon = 1e-9
    config.optimizer.clip_norm = 1.0
    config.learning_rate.name = "noam"
    config.learning_rate.noam_factor = 0.2
    config.learning_rate.warmup_steps = 150
    config.checkpoint.every = 50
    config.checkpoint.keep_best = 1
    config.checkpoint.best_metric = "eval_exact_match"
    return config
