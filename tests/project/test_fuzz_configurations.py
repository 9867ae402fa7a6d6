"""Random configurations, right and wrong: a line, or a result, and never a traceback."""

import re

from scripts.benchmarks import fuzz
from scripts.benchmarks.fuzz import main


def test_no_configuration_is_a_traceback(capsys):
    code, said = main(["--cases=100", "--seed=3"]), capsys.readouterr().out
    assert code == 0, said
    assert said.endswith(" passed, 0 exceptions other than UserError\n")
    explained, planned = (int(re.search(rf"(\d+) {kind}, passed", said)[1]) for kind in ("explained", "planned"))
    assert explained > 20, "many are legal"
    assert planned


def test_an_exception_is_shown_with_its_case_and_fails(capsys, monkeypatch):
    def broken(words):
        raise OverflowError("int too large")

    monkeypatch.setattr(fuzz.explain, "main", broken)
    monkeypatch.setattr(fuzz, "CASES_A_PLAN", 100)
    monkeypatch.setattr(fuzz.plan, "main", lambda words: 0)
    assert main(["--cases=3"]) == 1
    *shown, _, last = capsys.readouterr().out.splitlines()
    assert shown.count("OverflowError: int too large") == 2
    assert [line[:8] for line in shown if line.startswith("case ")] == ["case 1: ", "case 2: "]
    assert last == "seed 0: 3 cases, 0 refused, 1 passed, 2 exceptions other than UserError"


def test_a_seed_draws_the_same_cases_again(capsys, monkeypatch):
    drawn = []
    monkeypatch.setattr(fuzz, "outcome", lambda case, file, planned: drawn.append((case.words[1:], case.file)))
    for seed in (3, 3, 4):
        main(["--cases=20", f"--seed={seed}"])
    assert drawn[:20] == drawn[20:40] != drawn[40:]
