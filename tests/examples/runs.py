"""The steps of a configuration on any mesh, on the batches that a run has there."""

from typing import Any

import jax
import numpy as np

from meshtrain.assembly.assemble import Assembly, assemble
from meshtrain.config.schema import Config
from meshtrain.data.loader import batches
from meshtrain.run.dataset import open_data
from tests.parity.comparison import Trained
from tests.parity.runs import by_path, first_moments, sizes


def stepped(config: Config, **axes: int) -> tuple[Trained, Assembly, Any, Any]:
    """What the steps make of the weights; the assembly, the last state and the last batch."""
    shape = sizes(**axes)
    assembly = assemble(config, shape, jax.devices()[: int(np.prod(list(shape.values())))])
    state = assembly.steps.init(jax.random.key_data(jax.random.key(config.seed)))
    initial, losses, norms, gradients = by_path(state.params), [], [], {}
    step = assembly.steps.train.lower(assembly.state, assembly.batch).compile()
    examples = open_data(config, assembly.task).train
    of_training = batches(examples, batch=assembly.batch, seed=config.seed, num_threads=0)
    for _ in range(config.num_steps):
        state, metrics = step(state, batch := next(of_training))
        losses.append(float(metrics["loss"]))
        norms.append(float(metrics["grad_norm"]))
        gradients = gradients or first_moments(state.opt_state)
    trained = Trained(initial, by_path(state.params), gradients, np.array(losses), np.array(norms))
    return trained, assembly, state, batch
