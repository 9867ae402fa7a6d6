"""The table of what tests cost, as `scripts/test_cost --all` prints it."""

import json

from scripts.cost_table import main


def test_a_row_a_folder_and_a_column_a_stage(tmp_path, capsys):
    stages = {"fast": {"run": 90.4, "parity": 120.0}, "slow": {"run": 209.6}}
    words = []
    for stage, folders in stages.items():
        (tmp_path / stage).write_text(json.dumps(folders))
        words.append(f"{stage}={tmp_path / stage}")
    assert main(words) == 0
    assert capsys.readouterr().out.splitlines() == [
        "| CPU seconds of | fast | slow |",
        "|---|---:|---:|",
        "| run | 90 | 210 |",
        "| parity | 120 |  |",
        "| all | 210 | 210 |",
        "| minutes over two cores | 1.8 | 1.7 |",
    ]
