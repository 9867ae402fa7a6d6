"""A run that jax 0.10.2 on Python 3.11 has stopped goes on with the installed JAX as it would have with jax 0.10.2.

The archive contains the configuration and the workdir, saved at step 3 of 6 on data 2 x fsdp 2. The losses and gradient
norms below are those with which jax 0.10.2 went on.
"""

import json
import pathlib
import tarfile

import pytest

from meshtrain.main import main

ARCHIVE = pathlib.Path(__file__).parent / "fixtures" / "jax_0_10_2.tar.xz"
LOSSES = {4: 3.4274721145629883, 5: 3.4414238929748535, 6: 3.4428865909576416}
NORMS = {4: 0.599309504032135, 5: 0.6091369986534119, 6: 0.6942320466041565}
EVAL_LOSSES = {4: 3.430804491043091, 6: 3.425762176513672}


def test_a_run_of_jax_0_10_2_goes_on(tmp_path, monkeypatch, capsys):
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(tmp_path, filter="data")
    monkeypatch.chdir(tmp_path)
    assert json.loads((tmp_path / "run/checkpoints/3/extra/metadata").read_text())["versions"]["jax"] == "0.10.2"
    main(["--config=config.py", "--workdir=run"])
    assert "WARNING" not in capsys.readouterr().err
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    for name, expected in {"loss": LOSSES, "grad_norm": NORMS, "eval_loss": EVAL_LOSSES}.items():
        resumed = {row["step"]: row[name] for row in rows if name in row and row["step"] > 3}
        assert resumed == pytest.approx(expected, rel=1e-5), name
