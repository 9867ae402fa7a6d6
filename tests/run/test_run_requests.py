"""Requests of an evaluation harness: likelihoods add up, and what is generated greedily is what is most likely."""

import re
import types

import pytest

from meshtrain import harness
from meshtrain.errors import UserError
from meshtrain.generation.answers import Wanted
from meshtrain.generation.sampling import Sampling

GREEDY = {"until": ["\n"], "max_gen_toks": 12}


@pytest.fixture(scope="module")
def asked(straight):
    return harness.open_requests(straight.directory)


def test_likelihoods_add_up(asked):
    """p(bc | a) = p(b | a) p(c | ab), and a text without a context stands behind the end of a document."""
    pairs = [("def", " f(x)"), ("def", " f"), ("def f", "(x)"), ("", "def f")]
    whole, first, second, alone = (one.log_probability for one in asked.likelihoods(pairs))
    assert whole == pytest.approx(first + second, rel=1e-5)
    assert min(first, second) < 0
    rolling = asked.rolling(["def f", "", "def f(x):\n    return x\n" * 5])
    assert rolling[:2] == [pytest.approx(alone, rel=1e-6), 0.0]
    assert rolling[2] < alone, "longer than a row, and each token counts"


def test_a_context_gives_its_last_blanks_to_the_continuation(asked):
    assert asked.encode_pair("def ", "f") == (list(b"def"), list(b" f"))
    assert asked.encode_pair("def", "f") == (list(b"def"), list(b"f"))
    assert asked.encode_pair(" \n", "f") == ([256], list(b" \nf"))
    assert asked.encode_pair("", "f") == ([256], list(b"f"))


def test_greedy_text_is_the_most_probable_and_ends_before_a_stop(asked):
    prompts = ["def f1(x", "    return"]
    texts = asked.generate([(prompt, GREEDY) for prompt in prompts])
    assert all(0 < len(text) <= 12 and "\n" not in text for text in texts), texts
    assert all(one.is_greedy for one in asked.likelihoods(list(zip(prompts, texts, strict=True))))
    stop = texts[0][2:4]
    [shorter] = asked.generate([(prompts[0], {**GREEDY, "until": stop})])
    assert shorter == texts[0][: texts[0].index(stop)]


def test_requests_are_drawn_with_their_options_and_come_back_in_order(asked, monkeypatch):
    calls = []

    def answers(generator, decode, prompts, wanted):
        calls.append((prompts, wanted))
        return [types.SimpleNamespace(text=f"{decode(ids)} {wanted.num_tokens}") for ids in prompts]

    monkeypatch.setattr(harness, "answers", answers)
    sampled = {"max_new_tokens": 3, "do_sample": True, "temperature": 0.5, "top_k": 7, "top_p": 0.9, "until": ["", "x"]}
    given = [("a", GREEDY), ("b", {}), ("c", GREEDY), ("d", sampled), ("e", {"until": None, "temperature": 0.7})]
    assert asked.generate(given) == ["a 12", "b 256", "c 12", "d 3", "e 256"]
    assert [wanted for _, wanted in calls] == [
        Wanted(12, Sampling(), ("\n",)),
        Wanted(256, Sampling(), ()),
        Wanted(3, Sampling(0.5, 7, 0.9), ("x",)),
    ]
    assert [len(prompts) for prompts, _ in calls] == [2, 2, 1]
    asked.generate([("x" * 100, GREEDY), ("y" * 100, {}), ("", GREEDY)])
    lengths = [[len(ids) for ids in prompts] for prompts, _ in calls[3:]]
    assert lengths == [[32 - 12, 1], [32 // 2]], "the end of a prompt, in what the new tokens leave of 32 positions"


def test_a_pipeline_is_folded(straight, capsys):
    words = ["--config.mesh.fsdp=1", "--config.mesh.pipeline=2"]
    asked = harness.open_requests(straight.directory, *words, step=10)
    assert asked.assembly.placed.program is None
    assert asked.assembly.mesh.size == 2
    assert "the pipeline of 2 is folded into tensor" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words, step, said",
    [
        ([], 3, "got step 3; allowed: 10; nearest: 10"),
        (["--config.sed=1"], None, r"sed: unknown key; allowed: .* did you mean"),
        (["--jsn"], None, "arguments: got '--jsn'; allowed: "),
        (
            ["--config.data.source=synthetic", "--config.data.path="],
            None,
            "data.source: got synthetic, whose ids are not text; allowed for the harness: data with a tokenizer",
        ),
    ],
)
def test_what_cannot_answer_is_one_line(straight, words, step, said):
    with pytest.raises(UserError, match=said) as caught:
        harness.open_requests(straight.directory, *words, step=step)
    assert len(caught.value.problems) == 1


def test_options_that_would_not_be_read_are_refused(asked):
    with pytest.raises(
        UserError, match=r"^generation_kwargs: got 'num_beams'; allowed: until, do_sample, .* max_gen_toks"
    ):
        asked.generate([("def", {"num_beams": 4})])


@pytest.mark.parametrize(
    "wrong",
    [{"temperature": "hot"}, {"temperature": -1}, {"top_p": 0}, {"top_k": None}, {"max_gen_toks": 0}, {"until": [5]}],
    ids=str,
)
def test_a_value_that_is_none_is_one_line(asked, wrong):
    ((name, value),) = wrong.items()
    with pytest.raises(
        UserError, match=rf"^generation_kwargs: got {name}={re.escape(repr(value))}; allowed: a "
    ) as caught:
        asked.generate([("def", {"do_sample": True} | wrong)])
    assert len(caught.value.problems) == 1
