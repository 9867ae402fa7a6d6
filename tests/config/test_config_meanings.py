"""Options whose meaning changed in 0.3: records of former runs are converted, and such runs do not resume."""

import dataclasses
import json

import pytest

from meshtrain import __version__
from meshtrain.__main__ import main
from meshtrain.config import meanings
from meshtrain.config.resolve import resolve, to_json
from meshtrain.config.resume import from_json
from meshtrain.errors import UserError
from meshtrain.hf.config_export import as_json

pytestmark = pytest.mark.quick

SMALL = {"num_layers": 3, "embed_dim": 8, "mlp_dim": 8, "num_heads": 2, "num_kv_heads": 2, "vocab_size": 16}
EXPERTS = {"num_experts": 4, "experts_per_token": 2, "expert_dim": 4}
MUON = {"optimizer": {"name": "muon"}}
# what a run of 0.2 chose -> its values today
ROWS = {
    "dense": ({"model": SMALL}, {}),
    "experts": ({"model": SMALL | EXPERTS | {"balance_weight": 0.01}}, {"model.balance_weight": 0.015}),
    "dense layers": ({"model": SMALL | EXPERTS | {"dense_layers": 1, "balance_weight": 0.02}}, {}),  # 2 layers, k = 2
    "one expert": (
        {"model": SMALL | EXPERTS | {"experts_per_token": 1, "balance_weight": 0.1}}, {"model.balance_weight": 0.3}
    ),
    "no balance loss": ({"model": SMALL | EXPERTS | {"balance_weight": 0.0}}, {}),
    "muon": ({"model": SMALL} | MUON, {"optimizer.muon_bias_correction": True}),
    "both": (
        {"model": SMALL | EXPERTS | {"balance_weight": 0.02}} | MUON,
        {"model.balance_weight": 0.03, "optimizer.muon_bias_correction": True},
    ),
}  # fmt: skip


def test_texts_of_a_former_run_began_with_no_token():
    data = {"source": "text", "path": "a.txt", "tokenizer": "models/small"}
    assert meanings.today({"data": data})[1] == {"data.begin_token": "none"}
    assert meanings.today({"data": data | {"tokenizer": "bytes"}})[1] == {}
    assert meanings.today({"data": data | {"source": "tokens"}})[1] == {}
    assert meanings.today({"version": "0.3.0", "data": data})[1] == {}


def former(given):
    """The record of a run of 0.2: without a version, and without options that came later."""
    values = json.loads(to_json(resolve({**given, "data": {"source": "synthetic"}})))
    assert values.pop("version") == __version__
    del values["optimizer"]["muon_bias_correction"]
    return values


@pytest.mark.parametrize("name", ROWS)
def test_a_former_record_is_read_with_the_values_of_today(name):
    given, expected = ROWS[name]
    values, converted = meanings.today(former(given))
    assert converted == expected
    config = from_json(json.dumps(former(given)))
    for key, value in expected.items():
        group, _, option = key.partition(".")
        assert values[group][option] == getattr(getattr(config, group), option) == value
    assert from_json(to_json(config)) == config, "a record of today is not converted again"


def test_the_converted_weight_gives_the_former_loss():
    """Then weight x sum over layers of losses divided by k, now weight x mean over layers of losses summed over k."""
    options = from_json(json.dumps(former(ROWS["experts"][0]))).model
    of_layers = [1.2, 1.0, 1.1]  # divided by k
    now = options.balance_weight * options.experts_per_token * sum(of_layers) / len(of_layers)
    assert now == pytest.approx(0.01 * sum(of_layers), rel=1e-12)
    softmax = dataclasses.replace(options, z_weight=0.0)
    assert as_json(softmax, "mixtral", "float32", 8, -1, {})["router_aux_loss_coef"] == 0.015


BROKEN = [
    {"model": None}, {"model": {"num_experts": 4}}, {"optimizer": []}, {"model": EXPERTS | {"experts_per_token": 0}},
    {"model": SMALL | EXPERTS | {"balance_weight": "x"}}, {"model": SMALL | EXPERTS | {"balance_weight": 10**400}},
    {"model": SMALL | EXPERTS | {"balance_weight": None}}, {"model": SMALL | EXPERTS | {"num_layers": []}},
]  # fmt: skip


@pytest.mark.parametrize("values", BROKEN, ids=str)
def test_a_strangers_record_is_left_as_it_is(values):
    assert meanings.today(values) == (values, {})


def test_a_former_run_does_not_resume_and_one_line_names_what_it_chose(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    given = ROWS["both"][0]
    (run / "config.json").write_text(json.dumps(former(given)))
    words = [f"--config.model.{key}={value}" for key, value in given["model"].items()]
    steps = ["--config.data.source=synthetic", "--config.optimizer.name=muon", "--config.num_steps=1"]
    with pytest.raises(UserError) as error:
        main(["train", "--config=tiny", f"--workdir={run}", *words, *steps])
    assert list(error.value.problems) == [
        f"workdir {run} holds a run of version 0.2 or earlier, whose model.balance_weight, "
        "optimizer.muon_bias_correction had another meaning; allowed: runs since 0.3; nearest: another --workdir "
        "--config.model.balance_weight=0.03 --config.optimizer.muon_bias_correction=true"
    ]
    assert [path.name for path in run.iterdir()] == ["config.json"]
