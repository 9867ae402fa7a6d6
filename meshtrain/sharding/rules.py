"""The axes of the mesh, and the table of rules: which mesh axes split which logical axis, for weights and activations.

An axis is one record with its roles. In mesh order the axis with the slowest network comes first: a mesh is filled in
row-major order, so the last axes connect neighbours on the fast links within a host. `tensor` communicates within every
layer, and so do `context` and `expert`, with fewer bytes. `fsdp` communicates once per layer, `pipeline` once per
microbatch, and `data` once per step.

To add an axis, add a record to `AXIS_RECORDS`; CONTRIBUTING.md lists the further changes that a role needs.
"""

import dataclasses
from collections.abc import Mapping

from meshtrain.errors import Problem, refuse, unknown
from meshtrain.options import Except, option

DATA = "data"
PIPELINE = "pipeline"
CONTEXT = "context"
EXPERT = "expert"
TENSOR = "tensor"


@dataclasses.dataclass(frozen=True)
class Axis:
    """One axis of the mesh.

    Attributes:
      name: the name of the axis, as in the option `mesh.NAME`.
      text: the help of the option `mesh.NAME`: one line that explains the size.
      splits_batch: whether the axis shards the batch: devices along it compute different sequences.
      splits_sequence: whether the axis shards each sequence: devices along it compute different tokens of the same
        sequences.
      stores_weights: whether the axis shards weights for storage only: they are gathered over it before they are used.
      splits_experts: whether the axis shards experts, which are not gathered: tokens are sent to the devices of their
        experts.
      splits_model: whether devices along the axis compute different parts of the model, with different weights.
      is_manual: whether this program calls the collectives over the axis itself (`jax.shard_map`), at least while
        gradients are computed. Over all other axes the partitioner inserts the collectives.
    """

    name: str
    text: str
    splits_batch: bool = False
    splits_sequence: bool = False
    stores_weights: bool = False
    splits_experts: bool = False
    splits_model: bool = False
    is_manual: bool = False


AXIS_RECORDS = (
    Axis(DATA, "replicas of the weights, each with its own shard of the batch", splits_batch=True, is_manual=True),
    Axis(PIPELINE, "pipeline stages, each with consecutive layers", splits_model=True, is_manual=True),
    Axis(
        "fsdp",
        "shards of the batch; weights are sharded too, and gathered before use",
        splits_batch=True,
        stores_weights=True,
    ),
    Axis(
        EXPERT,
        "shards of the batch; experts are split, other weights are sharded too, and gathered before use",
        splits_batch=True,
        stores_weights=True,
        splits_experts=True,
    ),
    Axis(
        CONTEXT,
        "shards of each sequence; weights are sharded too, and gathered before use",
        splits_sequence=True,
        stores_weights=True,
    ),
    Axis(TENSOR, "shards of the heads, mlp and vocabulary dims of weights", splits_model=True),
)
AXES = tuple(axis.name for axis in AXIS_RECORDS)


def sizes_text(shape: Mapping[str, int]) -> str:
    """Returns the mesh axes larger than 1 as text, such as `data 8 x fsdp 8`; empty for one device."""
    return " x ".join(f"{axis} {size}" for axis, size in shape.items() if size > 1)


def batch_axes() -> tuple[str, ...]:
    """Returns the axes that split the batch, in mesh order."""
    return tuple(axis.name for axis in AXIS_RECORDS if axis.splits_batch)


def sequence_axes() -> tuple[str, ...]:
    """Returns the axes that split each sequence, in mesh order."""
    return tuple(axis.name for axis in AXIS_RECORDS if axis.splits_sequence)


def storage_axes() -> tuple[str, ...]:
    """Returns the axes that split weights for storage only. At ZeRO level 3, `rules_of_level` adds the data axis."""
    return tuple(axis.name for axis in AXIS_RECORDS if axis.stores_weights)


def expert_axes() -> tuple[str, ...]:
    """Returns the axes that split experts, in mesh order."""
    return tuple(axis.name for axis in AXIS_RECORDS if axis.splits_experts)


def model_axes() -> tuple[str, ...]:
    """Returns the axes along which devices compute different parts of the model, in mesh order."""
    return tuple(axis.name for axis in AXIS_RECORDS if axis.splits_model)


def partitioned_axes() -> tuple[str, ...]:
    """Returns the axes that are never manual, in mesh order; the partitioner inserts the collectives over them."""
    return tuple(axis.name for axis in AXIS_RECORDS if not axis.is_manual)


# Logical axes that replace `head_dim`, `mlp` and `expert_mlp` in an adapter's factor without a dim `embed`.
ADAPTER_HEAD_DIM, ADAPTER_MLP, ADAPTER_EXPERT_MLP = "adapter_head_dim", "adapter_mlp", "adapter_expert_mlp"


@dataclasses.dataclass(frozen=True)
class LayoutOptions:
    """Options of sharding, except the sizes of the mesh."""

    sequence_parallel: bool = option(
        False, "shard the sequence dim of norms and residuals over the tensor axis",
        only_for={"mesh.tensor": Except(1)},
    )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Rule:
    """The mesh axes that split one logical axis.

    Attributes:
      name: the logical axis.
      parameters: the mesh axes that split it in a stored weight, outermost first; () does not split it.
      activations: the mesh axes that split it in an activation; () does not split it.
      stays_split: whether a weight is never gathered along this logical axis, even over axes that split other weights
        for storage only.
    """

    name: str
    parameters: tuple[str, ...] = ()
    activations: tuple[str, ...] = ()
    stays_split: bool = False


@dataclasses.dataclass(frozen=True)
class Rules:
    """The complete table of rules: the mesh axes that split each logical axis.

    Attributes:
      entries: one rule for each logical axis.
      own: names of the user's rules; each of these that splits weights must match at least one weight.
      storage_axes: mesh axes that split weights for storage only: a weight is gathered over them before it is used.
    """

    entries: tuple[Rule, ...]
    own: tuple[str, ...] = ()
    storage_axes: tuple[str, ...] = dataclasses.field(default_factory=storage_axes)

    def __post_init__(self) -> None:
        problems = []
        seen: set[str] = set()
        for rule in self.entries:
            if rule.name in seen:
                problems.append(
                    Problem(f"rule '{rule.name}'", fault="is listed twice", allowed="once", nearest="drop one of them")
                )
            seen.add(rule.name)
            for column in ("parameters", "activations"):
                split = getattr(rule, column)
                if isinstance(split, str):  # its letters would be read as axes
                    problems.append(
                        Problem(
                            f"rule '{rule.name}', {column}",
                            got=f"'{split}', a text",
                            allowed="a tuple of mesh axes",
                            nearest=f"('{split}',)",
                        )
                    )
                    continue
                for axis in dict.fromkeys(split):
                    if axis not in AXES:
                        problems.append(unknown(f"rule '{rule.name}', {column}: mesh axis", axis, AXES))
                    if split.count(axis) > 1:
                        once = tuple(dict.fromkeys(split))
                        problems.append(
                            Problem(
                                f"rule '{rule.name}', {column}",
                                got=f"mesh axis '{axis}' {split.count(axis)} times",
                                allowed="once",
                                nearest=once,
                            )
                        )
        problems += [unknown("storage axis", axis, AXES) for axis in self.storage_axes if axis not in AXES]
        refuse(problems)

    @property
    def parameters(self) -> Mapping[str, tuple[str, ...]]:
        """Logical axis -> the mesh axes that split it in stored weights."""
        return {rule.name: rule.parameters for rule in self.entries}

    @property
    def activations(self) -> Mapping[str, tuple[str, ...]]:
        """Logical axis -> the mesh axes that split it in activations."""
        return {rule.name: rule.activations for rule in self.entries}

    @property
    def gathered(self) -> Mapping[str, tuple[str, ...]]:
        """Logical axis -> the mesh axes that split it in gathered weights: `parameters` without the storage axes.

        A rule with `stays_split` keeps all of its axes.
        """
        return {
            rule.name: tuple(axis for axis in rule.parameters if rule.stays_split or axis not in self.storage_axes)
            for rule in self.entries
        }


def default_rules(options: LayoutOptions) -> Rules:
    """Returns the table of rules for the built-in models; `extend` adds the logical axes of other models.

    Tensor parallelism follows Megatron-LM (Shoeybi et al. 2019): heads and mlp are split over tensor, so the first
    matmul of a pair is column parallel and the second row parallel. Sequence parallelism (Korthikanti et al. 2022)
    shards the residual stream between the pairs along the sequence, over the same axis. A pair of convolutions is split
    in the same way over its `filters`.

    The rule `batch` has every axis that splits the batch, and the rule `sequence` every axis that splits sequences. The
    axes that store weights split the dims `embed`, `filters` and `from_latent` (the input dim of weights that project
    from a latent) of stored weights. They also split the output dim of an adapter's factor that has no dim `embed`. The
    latent dim of an activation is not split. Layers before the pipeline's layers are stored on all stages. Experts are
    split over the expert axis, and the dim `expert_embed` of their weights over the other storage axes.

    >>> rules = default_rules(LayoutOptions())
    >>> rules.parameters["vocab"], rules.parameters["heads"], rules.parameters["norm"]
    (('pipeline', 'tensor'), ('tensor',), ())
    >>> default_rules(LayoutOptions(sequence_parallel=True)).activations["residual_sequence"]
    ('context', 'tensor')
    """
    residual = (*sequence_axes(), *(("tensor",) if options.sequence_parallel else ()))
    filters = ("tensor", *storage_axes())
    of_experts = tuple(axis for axis in storage_axes() if axis not in expert_axes())
    return Rules(
        (
            #     logical axis         a stored weight           an activation
            Rule("batch",             (),                       batch_axes()),
            Rule("sequence",          (),                       sequence_axes()),
            Rule("residual_sequence", (),                       residual),
            Rule("vocab",             ("pipeline", "tensor"),   ("tensor",)),
            Rule("embed",             storage_axes(),           ()),
            Rule("mlp",               ("tensor",),              ("tensor",)),
            Rule("heads",             ("tensor",),              ("tensor",)),
            Rule("kv_heads",          ("tensor",),              ("tensor",)),
            Rule("head_dim",          (),                       ()),
            Rule("latent",            (),                       ()),
            Rule("from_latent",       storage_axes(),           ()),
            Rule(ADAPTER_HEAD_DIM,    storage_axes(),           ()),
            Rule(ADAPTER_MLP,         filters,                  ("tensor",)),
            Rule("experts",           expert_axes(),            (), stays_split=True),
            Rule("expert_embed",      of_experts,               ()),
            Rule("expert_mlp",        ("tensor",),              ("tensor",)),
            Rule(ADAPTER_EXPERT_MLP,  ("tensor", *of_experts),  ("tensor",)),
            Rule("router",            (),                       ()),
            Rule("layers",            ("pipeline",),            ()),
            Rule("chunks",            (),                       ()),
            Rule("first_layers",      (),                       ()),
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
      rules: the table of rules to extend.
      *own: the user's rules.

    Raises:
      UserError: `own` contains a name twice, an unknown mesh axis, or a mesh axis twice in one rule.
    """
    names = tuple(rule.name for rule in own)
    kept = tuple(rule for rule in rules.entries if rule.name not in names)
    marked = rules.own + tuple(name for name in names if name not in rules.own)
    return dataclasses.replace(rules, entries=kept + own, own=marked)
