"""Checks of a mesh whose devices compute parts of each sequence. Each returns lines: got, allowed, nearest fix."""

from collections.abc import Mapping

from meshtrain.config.fields import Config
from meshtrain.layout.axes import CONTEXT
from meshtrain.layout.rules import Rules
from meshtrain.models.task import Task, entries


def problems(config: Config, task: Task, rules: Rules, mesh_shape: Mapping[str, int]) -> list[str]:
    """Returns one line for each reason why the devices of a mesh cannot compute parts of each sequence.

    Args:
      config: the configuration.
      task: what is trained.
      rules: the axes that split the dims of a batch count.
      mesh_shape: the size of each mesh axis; `context` is larger than 1.
    """
    size, found = mesh_shape[CONTEXT], list[str]()
    split = {name for name, axes in rules.activations.items() if CONTEXT in axes}
    if not any(split & set(entry.axes) for entry in entries(task, config.batch_size).values()):
        found.append(
            f"mesh.{CONTEXT}: got {size}, and no entry of this task's batch has a dim 'sequence'; allowed: 1; "
            f"nearest: mesh.{CONTEXT}=1"
        )
    return found
