"""One table says which mesh axes split which logical axis, for weights and for activations."""

import dataclasses
from collections.abc import Mapping

from meshtrain.errors import UserError, unknown
from meshtrain.options import AllBut, option
from meshtrain.sharding import axes
from meshtrain.sharding.axes import AXES

# The dim of an adapter's factor that would be `head_dim` or `mlp` in a factor that has a dim `embed` as well.
ADAPTER_HEAD_DIM, ADAPTER_MLP, ADAPTER_EXPERT_MLP = "adapter_head_dim", "adapter_mlp", "adapter_expert_mlp"


@dataclasses.dataclass(frozen=True)
class LayoutOptions:
    """The options of placement besides the mesh."""

    sequence_parallel: bool = option(
        False, "shard the sequence dim of norms and residuals over the tensor axis",
        only_for={"mesh.tensor": AllBut(1)},
    )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Rule:
    """The mesh axes that split one logical axis.

    Attributes:
      name: the logical axis.
      parameters: the mesh axes that split it in a stored weight, the outermost first; () keeps it whole.
      activations: the mesh axes that split it in an activation; () keeps it whole.
      stays_split: a weight is not gathered along it, even over axes that split other weights for storage only.
    """

    name: str
    parameters: tuple[str, ...] = ()
    activations: tuple[str, ...] = ()
    stays_split: bool = False


@dataclasses.dataclass(frozen=True)
class Rules:
    """The whole table.

    Attributes:
      entries: one rule for each logical axis.
      own: names of the user's own rules: each that splits weights has to match at least one weight.
      storage_axes: mesh axes that split weights for storage only: a weight is gathered over them before it computes.
    """

    entries: tuple[Rule, ...]
    own: tuple[str, ...] = ()
    storage_axes: tuple[str, ...] = dataclasses.field(default_factory=axes.storage_axes)

    def __post_init__(self) -> None:
        problems = []
        seen: set[str] = set()
        for rule in self.entries:
            if rule.name in seen:
                problems.append(f"rule '{rule.name}': stands twice; allowed: once; nearest: drop one of them")
            seen.add(rule.name)
            for column, split in (("parameters", rule.parameters), ("activations", rule.activations)):
                for axis in dict.fromkeys(split):
                    if axis not in AXES:
                        problems.append(unknown(f"rule '{rule.name}', {column}: mesh axis", axis, AXES))
                    if split.count(axis) > 1:
                        once = tuple(dict.fromkeys(split))
                        problems.append(
                            f"rule '{rule.name}', {column}: got mesh axis '{axis}' {split.count(axis)} times; "
                            f"allowed: once; nearest: {once}"
                        )
        problems += [unknown("storage axis", axis, AXES) for axis in self.storage_axes if axis not in AXES]
        if problems:
            raise UserError(*problems)

    @property
    def parameters(self) -> Mapping[str, tuple[str, ...]]:
        """Logical axis -> mesh axes, for stored weights."""
        return {rule.name: rule.parameters for rule in self.entries}

    @property
    def activations(self) -> Mapping[str, tuple[str, ...]]:
        """Logical axis -> mesh axes, for activations."""
        return {rule.name: rule.activations for rule in self.entries}

    @property
    def gathered(self) -> Mapping[str, tuple[str, ...]]:
        """Logical axis -> mesh axes, for a weight gathered to compute: its stored axes without the storage axes.

        A rule that stays split keeps all of its axes.
        """
        return {
            rule.name: tuple(axis for axis in rule.parameters if rule.stays_split or axis not in self.storage_axes)
            for rule in self.entries
        }


def default_rules(options: LayoutOptions) -> Rules:
    """Returns the table for the built-in models; `extend` adds the logical axes of other models.

    Tensor parallelism as in Megatron-LM (Shoeybi et al. 2019): heads and mlp are split over tensor, so the first matmul
    of a pair is column parallel and the second row parallel. Sequence parallelism (Korthikanti et al. 2022) shards the
    residual stream between the pairs along the sequence, over the same axis. A pair of convolutions is split the same
    way over its `filters`, which are also the dim that is stored in shards. So is the last dim of an adapter's factor
    that has no dim `embed`. Experts are split over an axis of their own, and their other dims are stored over the other
    ones. The row `batch` has every axis that splits the batch, the row `sequence` every axis that splits sequences, and
    the row `embed` every axis that stores weights (`axes.py`).

    >>> rules = default_rules(LayoutOptions())
    >>> rules.parameters["vocab"], rules.parameters["heads"], rules.parameters["norm"]
    (('pipeline', 'tensor'), ('tensor',), ())
    >>> default_rules(LayoutOptions(sequence_parallel=True)).activations["residual_sequence"]
    ('context', 'tensor')
    """
    residual = (*axes.sequence_axes(), *(("tensor",) if options.sequence_parallel else ()))
    filters = ("tensor", *axes.storage_axes())
    of_experts = tuple(axis for axis in axes.storage_axes() if axis not in axes.expert_axes())
    return Rules(
        (
            #     logical axis         a stored weight           an activation
            Rule("batch",             (),                       axes.batch_axes()),
            Rule("sequence",          (),                       axes.sequence_axes()),
            Rule("residual_sequence", (),                       residual),
            Rule("vocab",             ("pipeline", "tensor"),   ("tensor",)),
            Rule("embed",             axes.storage_axes(),      ()),
            Rule("mlp",               ("tensor",),              ("tensor",)),
            Rule("heads",             ("tensor",),              ("tensor",)),
            Rule("kv_heads",          ("tensor",),              ("tensor",)),
            Rule("head_dim",          (),                       ()),
            Rule(ADAPTER_HEAD_DIM,    axes.storage_axes(),      ()),
            Rule(ADAPTER_MLP,         filters,                  ("tensor",)),
            Rule("experts",           axes.expert_axes(),       (), stays_split=True),
            Rule("expert_embed",      of_experts,               ()),
            Rule("expert_mlp",        ("tensor",),              ("tensor",)),
            Rule(ADAPTER_EXPERT_MLP,  ("tensor", *of_experts),  ("tensor",)),
            Rule("router",            (),                       ()),
            Rule("layers",            ("pipeline",),            ()),
            Rule("chunks",            (),                       ()),
            Rule("positions",         (),                       ()),
            Rule("norm",              (),                       ()),
            Rule("height",            (),                       ()),
            Rule("width",             (),                       ()),
            Rule("channels",          (),                       ()),
            Rule("filters",           filters,                  ("tensor",)),
        )
    )  # fmt: skip


def extend(rules: Rules, *own: Rule) -> Rules:
    """Returns the table with a user's rules added; each replaces the rule of the same name.

    >>> rules = extend(default_rules(LayoutOptions()), Rule("rows"), Rule("mlp", parameters=("fsdp", "tensor")))
    >>> rules.parameters["rows"], rules.parameters["mlp"]
    ((), ('fsdp', 'tensor'))

    Args:
      rules: the table to extend.
      *own: the user's rules.

    Raises:
      UserError: a name twice among `own`, an unknown mesh axis, a mesh axis twice in one rule.
    """
    names = tuple(rule.name for rule in own)
    kept = tuple(rule for rule in rules.entries if rule.name not in names)
    marked = rules.own + tuple(name for name in names if name not in rules.own)
    return dataclasses.replace(rules, entries=kept + own, own=marked)
