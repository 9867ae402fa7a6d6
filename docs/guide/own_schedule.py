"""A pipeline schedule of one's own: GPipe in groups of as many microbatches as stages.

No stage keeps more microbatches than there are stages; the first of 1f1b keeps almost twice as many. Each group has a
bubble of its own.

python -m meshtrain pipeline --schedule=docs.guide.own_schedule:in_groups --stages=4 --microbatches=8
python -m meshtrain train --config=configs/3d.py --config.pipeline.schedule=docs.guide.own_schedule:in_groups
"""


def in_groups(stages: int, microbatches: int, chunks: int) -> list[list[tuple[str, int] | None]]:
    """Returns a row for each moment, with what each stage does in it: a pass of a microbatch, or None for nothing."""
    rows = []
    for first in range(0, microbatches, stages):
        group = range(first, min(first + stages, microbatches))
        for kind, delays in (("F", range(stages)), ("B", range(stages)[::-1])):
            for moment in range(len(group) + stages - 1):
                places = [moment - delay for delay in delays]
                rows.append([(kind, group[place]) if 0 <= place < len(group) else None for place in places])
    return rows
