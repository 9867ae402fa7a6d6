"""A custom pipeline schedule: runs GPipe on one group of microbatches after another; a group has one per stage.

With S stages, a stage stores activations of at most S microbatches; the first stage of 1f1b stores up to 2 S - 1. The
pipeline is filled and drained once for each group, so the stages are idle more often than with GPipe.

python -m meshtrain pipeline --schedule=docs.guide.own_schedule:in_groups --stages=4 --microbatches=8
python -m meshtrain train --config=configs/3d.py --config.pipeline.schedule=docs.guide.own_schedule:in_groups
"""


def in_groups(stages: int, microbatches: int, chunks: int) -> list[list[tuple[str, int] | None]]:
    """Returns a row for each clock tick, with an action for each stage: a pass of a microbatch, or None if idle."""
    rows = []
    for first in range(0, microbatches, stages):
        group = range(first, min(first + stages, microbatches))
        for kind, delays in (("F", range(stages)), ("B", range(stages)[::-1])):
            for moment in range(len(group) + stages - 1):
                places = [moment - delay for delay in delays]
                rows.append([(kind, group[place]) if 0 <= place < len(group) else None for place in places])
    return rows
