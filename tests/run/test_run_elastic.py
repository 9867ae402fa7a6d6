"""Fewer processes than the job has: the batch stays, and a microbatch has no more sequences than on all of them."""

import dataclasses
import math

import pytest

from meshtrain.config.schema import Config
from meshtrain.errors import TooFew, UserError
from meshtrain.run import elastic
from meshtrain.sharding.rules import AXES

pytestmark = pytest.mark.quick


def spread(num_processes, full, *, batch_size=24, steps=1, devices_each=1, pipeline_parts=0, **axes):
    """The configuration on `num_processes`, whose mesh has these axes and data over what is left."""
    shape = {axis: axes.get(axis, 1) for axis in AXES}
    shape["data"] = num_processes * devices_each // math.prod(axes.values())
    config = dataclasses.replace(Config(), batch_size=batch_size, accumulation_steps=steps)
    pipeline = dataclasses.replace(config.pipeline, num_microbatches=pipeline_parts or 1)
    return elastic.spread(dataclasses.replace(config, pipeline=pipeline), shape, num_processes, full)[0]


@pytest.mark.parametrize(
    ("num_processes", "options", "steps"),
    [
        (4, {}, 1),
        (3, {}, 2),  # 8 sequences on a device, in parts of 4: 6 on all four
        (2, {}, 2),
        (1, {}, 4),
        (3, {"steps": 2}, 4),  # in parts of 2: 3 on all
        (2, {"steps": 3}, 6),
        (3, {"devices_each": 2}, 2),
        (3, {"devices_each": 2, "fsdp": 2}, 2),  # shards of the batch too
        (3, {"devices_each": 2, "tensor": 2}, 2),
        (2, {"devices_each": 2, "pipeline": 2, "pipeline_parts": 3}, 2),
        (3, {"batch_size": 36}, 2),
        (3, {"batch_size": 60}, 2),  # 20 in parts of 10, where 15 were allowed
        (5, {"batch_size": 30, "steps": 1, "full": 6}, 2),  # 6 in parts of 3: a part of 5 does not divide them
    ],
)
def test_the_least_number_of_steps_keeps_a_microbatch_no_larger(num_processes, options, steps):
    full = options.pop("full", 4)
    assert spread(num_processes, full, **options).accumulation_steps == steps


def test_the_line_has_the_numbers_of_processes_that_fit_and_the_nearest():
    with pytest.raises(TooFew) as error:
        spread(5, 8)
    assert str(error.value) == (
        "processes: got 5 of 8, 5 devices, whose shards do not divide batch_size = 24; allowed: 1, 2, 3, 4, 6, 8; "
        "nearest: 4"
    )


def test_only_a_mesh_that_takes_what_is_left_may_have_fewer():
    config = Config()
    assert elastic.check(dataclasses.replace(config, mesh=dataclasses.replace(config.mesh, data=-1))) == []
    assert elastic.check(config) == [
        "mesh.data: got 1, in a job that may continue with fewer processes; allowed: -1, the remaining devices; "
        "nearest: "
        "mesh.data=-1"
    ]


@pytest.mark.parametrize(("num_processes", "kind"), [(4, UserError), (3, TooFew)])
def test_a_mistake_is_the_users_alone_where_no_process_is_missing(num_processes, kind):
    with pytest.raises(UserError) as error, elastic.refusing(num_processes, 4):
        raise UserError("mesh.data: uneven")
    assert type(error.value) is kind
    assert error.value.problems[0] == "mesh.data: uneven"
    assert len(error.value.problems) == (1 if kind is UserError else 2)
