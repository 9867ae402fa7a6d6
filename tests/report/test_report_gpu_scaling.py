"""A scaling by the GPU's compiler: planned from its schedules it has the numbers of whole compilations."""

import json
import subprocess
import sys

import pytest

RUN = "import sys; from meshtrain.plan import __main__, scheduled_hlo; {}; __main__.main(sys.argv[1:])"
WORDS = ("--config=configs/tiny.py", "--cluster=h100:1x8", "--scaling=4,8", "--programs=2", "--config.mesh.fsdp=8")


@pytest.mark.gpu_compiler
def test_a_scaling_has_the_numbers_of_whole_compilations(tmp_path):
    found = []
    for change in (
        "scheduled_hlo.compile_step.__defaults__ = ()",
        "scheduled_hlo.COMPARED = None",
    ):  # what compiles whole fails, and all
        file = tmp_path / "scaling.json"
        code = RUN.format(change)
        subprocess.run([sys.executable, "-c", code, *WORDS, f"--json={file}"], check=True, stdout=subprocess.DEVNULL)
        found.append(json.loads(file.read_text()))
    assert found[0] == found[1]
    assert sum(row["step_seconds"] is not None for curve in found[0]["curves"] for row in curve["rows"]) >= 2
