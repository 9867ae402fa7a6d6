"""A custom pipeline schedule: GPipe in groups whose number of microbatches equals the number of stages.

A stage stores at most as many microbatches as there are stages; the first stage of 1f1b stores almost twice as many.
Each group has its own bubble.

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
