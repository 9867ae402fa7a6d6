"""A run's weights as a model of the evaluation harness: without its package by a stand-in, once with it."""

import importlib
import math
import sys
import types

import pytest

from meshtrain import harness
from meshtrain import harness as requests
from meshtrain.errors import UserError


class Instance:
    """A request as the harness makes them: its arguments as a tuple."""

    def __init__(self, *args):
        self.args = args


class Base:
    """Stands for `lm_eval.api.model.LM`: what its `__init__` sets."""

    def __init__(self):
        self.rank, self.world_size = 0, 1


@pytest.fixture
def without_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval.api.model", None)


@pytest.fixture
def with_stand_in(monkeypatch):
    for name in ("lm_eval", "lm_eval.api", "lm_eval.api.model"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    sys.modules["lm_eval.api.model"].LM = Base


def test_the_package_is_named_where_it_is_missing(without_package, straight):
    with pytest.raises(
        UserError, match=r"^lm_eval: got no package 'lm_eval.*'; .* nearest: pip install 'meshtrain\[eval"
    ):
        harness.language_model(straight.directory)


def test_the_model_answers_instances(with_stand_in, straight, monkeypatch):
    drawn = lambda generator, decode, prompts, wanted: [  # noqa: E731
        types.SimpleNamespace(text=f"{decode(ids)} {wanted.stops}") for ids in prompts
    ]
    monkeypatch.setattr(requests, "answers", drawn)
    model = harness.language_model(straight.directory)
    assert isinstance(model, Base)
    assert model.world_size == 1
    assert model.tokenizer_name == "bytes"
    own = requests.open_requests(straight.directory)
    [(total, is_greedy)] = model.loglikelihood([Instance("def f1", "(x")])
    assert (total, is_greedy) == tuple(own.likelihoods([("def f1", "(x")])[0])
    assert model.loglikelihood_rolling([Instance("def")]) == own.rolling(["def"])
    prompts = [Instance("def", {"until": ["\n"]}), Instance("if", {"until": ["x"]})]
    assert model.generate_until(prompts) == ["def ('\\n',)", "if ('x',)"]


def task(name, docs, **config):
    """A task of the harness whose documents are here: nothing is fetched."""
    datasets = importlib.import_module("datasets")
    given = {
        "task": name,
        "custom_dataset": lambda **_: {"test": datasets.Dataset.from_list(docs)},
        "test_split": "test",
    }
    return importlib.import_module("lm_eval.api.task").ConfigurableTask(config=given | config)


@pytest.mark.harness
@pytest.mark.filterwarnings("ignore")  # of packages that are not ours
def test_the_harness_evaluates_a_run(straight, monkeypatch):
    """Tasks of our own: continuations to choose from, a text to score, a text to generate."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    lm_eval = importlib.import_module("lm_eval")
    own, text = requests.open_requests(straight.directory), "def f1(x):\n    return x + 1\n" * 3
    prompts, choices = ["def f1(x", "    retur", "zzz"], ["):", "n x", "Q"]
    scores = [[own.likelihoods([(prompt, one)])[0].log_probability for one in choices] for prompt in prompts]
    answers = [row.index(max(row)) for row in scores]
    answers[2] = (answers[2] + 1) % 3  # one of three is wrong
    [written] = own.generate([("def f1(x", {"until": ["\n"], "max_gen_toks": 8})])
    tasks = [
        task(
            "choose",
            [{"prompt": prompt, "answer": answer} for prompt, answer in zip(prompts, answers, strict=True)],
            output_type="multiple_choice",
            doc_to_text="{{prompt}}",
            doc_to_choice=choices,
            doc_to_target="answer",
            target_delimiter="",
            metric_list=[{"metric": "acc"}],
        ),
        task(
            "score",
            [{"text": text}],
            output_type="loglikelihood_rolling",
            doc_to_text="",
            doc_to_target="{{text}}",
            metric_list=[{"metric": "bits_per_byte"}],
        ),
        task(
            "write",
            [{"prompt": "def f1(x", "answer": written}],
            output_type="generate_until",
            doc_to_text="{{prompt}}",
            doc_to_target="{{answer}}",
            generation_kwargs={"until": ["\n"], "max_gen_toks": 8},
            metric_list=[{"metric": "exact_match"}],
        ),
    ]
    model = harness.language_model(straight.directory)
    results = lm_eval.simple_evaluate(model=model, tasks=tasks, bootstrap_iters=0)["results"]
    assert results["choose"]["acc,none"] == pytest.approx(2 / 3)
    assert results["score"]["bits_per_byte,none"] == pytest.approx(-own.rolling([text])[0] / len(text) / math.log(2))
    assert results["write"]["exact_match,none"] == 1.0
