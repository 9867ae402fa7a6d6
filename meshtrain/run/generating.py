"""What a run's weights generate: whether its task can, and the generator on the run's devices."""

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import jax

from meshtrain.assemble import Assembly, assemble, kept_params
from meshtrain.config.tasks import MakeTask
from meshtrain.generation.token_loop import Generator
from meshtrain.generation.window import by_window
from meshtrain.launch.compiler import CompilerOptions
from meshtrain.models.decode import Decode
from meshtrain.models.task import Params, token_batch
from meshtrain.run.generation_mesh import without_pipeline
from meshtrain.sharding.rules import Rules
from meshtrain.step.shardings import shardings


class TextOfTokens(Protocol):
    """What generation needs of a tokenizer or a corpus."""

    @property
    def end_id(self) -> int:
        """The token that ends a text; -1: none does."""
        ...

    @property
    def encode(self) -> Callable[[str], list[int]]:
        """Text -> ids."""
        ...

    @property
    def decode(self) -> Callable[[Iterable[int]], str]:
        """Ids -> text."""
        ...


def problems_of_task(assembly: Assembly) -> list[str]:
    """Returns one line if a task cannot generate text: it has no way to, or entries in its batch other than text's."""
    if assembly.task.decode is not None:
        return []
    if assembly.logits is None:
        return ["task: got one without logits; allowed for generate: Task.logits, (params, batch) -> float32 "
                " [B, T, vocabulary]; nearest: Task(init, loss, batch, logits)"]  # fmt: skip
    filled = token_batch(1, 1)
    strange = [name for name in assembly.batch if name not in filled]
    if strange or "tokens" not in assembly.batch:
        return [
            f"task: got a batch of {', '.join(assembly.batch)}; allowed for generate: 'tokens', and of the others "
            f"{', '.join(filled)}; nearest: token_batch(B, T)"
        ]
    return []


def decode_of(assembly: Assembly) -> Decode:
    """Returns how a task without problems (see `problems_of_task`) generates tokens."""
    if assembly.task.decode is not None:
        return assembly.task.decode
    assert assembly.logits is not None
    return by_window(assembly.logits, assembly.batch)


def generator(
    assembly: Assembly, params: Params, end_ids: Sequence[int], compiler_options: CompilerOptions | None = None
) -> Generator:
    """Returns what generates with these weights.

    Args:
      assembly: without a pipeline, of a task without problems (see `problems_of_task`).
      params: with the shapes and shardings of `assembly.state.params`.
      end_ids: the tokens of which each ends a text; -1: none does.
      compiler_options: of XLA, by name; None: its defaults.
    """
    return Generator(decode_of(assembly), params, assembly.mesh, assembly.rules, end_ids, compiler_options)


def folded(
    assembly: Assembly, params: Params, make_task: MakeTask | None = None, rules: Rules | None = None
) -> tuple[Assembly, Params, str]:
    """Returns an assembly without a pipeline on the same devices, its weights, and one line that says so.

    Args:
      assembly: of a run.
      params: with the shapes and shardings of `assembly.state.params`.
      make_task: the caller's task function, as in `assemble`.
      rules: the caller's rules, as in `assemble`.

    Returns:
      What was given and an empty line where there is no pipeline.

    Raises:
      UserError: see `run.generation_mesh.without_pipeline`.
    """
    config, shape, line = without_pipeline(assembly.config, assembly.mesh.shape, make_task, rules)
    if not line:
        return assembly, params, line
    other = assemble(config, shape, list(assembly.mesh.devices.flat), make_task, rules)
    return other, jax.device_put(kept_params(assembly, params), shardings(other.state.params)), line
