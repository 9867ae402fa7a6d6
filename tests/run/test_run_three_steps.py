"""Three steps on data 2 x pipeline 2 x tensor 2: the losses and gradient norms of one device."""

import numpy as np
import pytest

pytestmark = pytest.mark.quick
SMALLER = (
    "num_steps=3",
    "eval_every=0",
    "num_eval_batches=1",
    "model.num_layers=2",
    "model.dropout_rate=0",
    "observe.tensorboard=False",
)
MESH = ("mesh.data=2", "mesh.pipeline=2", "mesh.tensor=2", "pipeline.schedule=1f1b")


def test_three_steps_on_eight_devices_have_the_numbers_of_one(run, tmp_path):
    of_eight, of_one = (run(tmp_path / name, *SMALLER, *mesh) for name, mesh in (("eight", MESH), ("one", ())))
    assert of_eight.result.assembly.mesh.size == 8
    for key in ("loss", "grad_norm"):
        got, wanted = ([row[key] for row in ran.rows if key in row] for ran in (of_eight, of_one))
        assert len(got) == 3
        np.testing.assert_allclose(got, wanted, rtol=1e-5)
    assert of_one.losses[3] < of_one.losses[1]
