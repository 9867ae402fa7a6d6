"""Where a run starts from, and what it keeps so that it can."""

import dataclasses
import json

import jax

from meshtrain.assemble import Assembly, stored_params
from meshtrain.config import to_json
from meshtrain.data.corpus import Corpus
from meshtrain.data.loader import next_sample
from meshtrain.errors import UserError
from meshtrain.step.state import TrainState
from meshtrain.store.checkpoint import Checkpoints, restore_params


def starting_state(assembly: Assembly, checkpoints: Checkpoints, step: int) -> TrainState:
    """Returns the state that was saved at `step`; at 0 initial weights, or those of `init_from`.

    Raises:
      UserError: the checkpoint is another model's, or further on than the run is to go.
    """
    config = assembly.config
    if step > config.num_steps:
        raise UserError(
            f"num_steps: got {config.num_steps}, and the workdir's run is at step {step}; allowed: at least {step}; "
            f"nearest: {step}"
        )
    if step:
        return assembly.from_kept(checkpoints.restore(step, assembly.kept_state))
    state = assembly.init(jax.random.key_data(jax.random.key(config.seed)))
    if not config.init_from:
        return state
    kept = restore_params(config.init_from, assembly.kept_state.params)
    return dataclasses.replace(state, params=stored_params(assembly, kept))


def save(assembly: Assembly, checkpoints: Checkpoints, corpus: Corpus, step: int, state: TrainState) -> None:
    """Starts to save a step; returns once the state's buffers may be overwritten."""
    extra = {
        "next_sample": next_sample(step, assembly.config.batch_size),
        "corpus": corpus.fingerprint,
        "config": json.loads(to_json(assembly.config)),
        "versions": {"jax": jax.__version__},
    }
    checkpoints.save(step, assembly.to_kept(state), extra)
