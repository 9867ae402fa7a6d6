"""What is said of weights that cannot be stored as rules and ZeRO level say, and of an axis that splits too little."""

import pytest

from meshtrain.sharding.param_sharding import rules_of_level
from meshtrain.sharding.rules import LayoutOptions, Rule, default_rules, extend
from meshtrain.sharding.tree_problems import tree_problems
from tests.sharding.conftest import array, shape_of

pytestmark = pytest.mark.quick

RULES = default_rules(LayoutOptions())


def lines(tree, axes, rules=RULES, mesh=None, level=0, **more):
    shape = mesh or shape_of(pipeline=2, fsdp=2, tensor=2)
    return tree_problems(tree, axes, rules_of_level(rules, level), shape, level, **more)


def test_a_size_that_does_not_divide_names_path_shape_rule_axis_and_the_nearest():
    (line,) = lines({"mlp": {"up": array(8, 101)}}, {"mlp": {"up": ("embed", "mlp")}}, mesh=shape_of(tensor=8))
    assert line == (
        "mlp/up: shape (8, 101): dim 1 has size 101, but rule 'mlp' splits it over mesh.tensor = 8; "
        "allowed: multiples of 8; nearest: 104, or mesh.tensor=1"
    )
    (line,) = lines({"kv": array(8, 2, 4)}, {"kv": ("embed", "kv_heads", "head_dim")}, mesh=shape_of(tensor=8))
    assert "nearest: 8, or mesh.tensor=2" in line
    (line,) = lines({"table": array(6, 8)}, {"table": ("vocab", "embed")})
    assert "over mesh.pipeline = 2 x mesh.tensor = 2; allowed: multiples of 4" in line
    assert "or mesh.pipeline x mesh.tensor = 3" in line


def test_an_unknown_name_gets_the_nearest():
    (line,) = lines({"w": array(8, 8)}, {"w": ("embd", None)})
    assert line.startswith("w: shape (8, 8): logical axis of dim 0: got 'embd'; allowed: batch, ")
    assert line.endswith("did you mean 'embed'?")


def test_one_mesh_axis_for_two_dims_is_refused_on_every_mesh():
    for mesh in (shape_of(), shape_of(fsdp=8)):
        (line,) = lines({"w": array(8, 8)}, {"w": ("embed", "embed")}, mesh=mesh)
        assert f"mesh axis 'fsdp' (size {mesh['fsdp']}) would split both dim 0 'embed' and dim 1 'embed'" in line
        assert line.endswith("nearest: ('embed', None)")
    (line,) = lines({"w": array(8, 8)}, {"w": ("mlp", "heads")})
    assert "dim 0 'mlp' and dim 1 'heads'" in line


def test_a_rank_that_differs_is_refused():
    assert "nearest: ('embed', None)" in lines({"w": array(8, 8)}, {"w": ("embed",)})[0]
    assert "nearest: ('embed',)" in lines({"w": array(8)}, {"w": ("embed", "mlp")})[0]
    assert "for 0 dims" in lines({"w": array()}, {"w": ("embed",)})[0]


@pytest.mark.parametrize("axes", [{}, {"w": None}, {"w": "embed"}])
def test_an_array_without_a_tuple_of_axes_is_refused(axes):
    (line,) = lines({"w": array(8, 8)}, axes)
    assert line.startswith("w: shape (8, 8): ")
    assert "nearest: (None, None)" in line


def test_axes_without_an_array_are_refused():
    (line,) = lines({"kernel": array(8)}, {"kernel": ("embed",), "kernal": ("embed",)})
    assert line.startswith("kernal: got logical axes ('embed',), but there is no array with this path")
    assert "did you mean 'kernel'" in line


def test_a_users_rule_has_to_match_an_array():
    rules = extend(RULES, Rule("expert", ("tensor",)), Rule("frames", (), ("data",)))
    tree, names = {"w": array(8, 8)}, {"w": ("embed", "mlp")}
    (line,) = lines(tree, names, rules)
    assert line == "rule 'expert' -> tensor (size 2): matches no array; allowed: embed, mlp"
    assert lines({"w": array(8)}, {"w": ("expert",)}, rules) == []


def test_all_problems_of_a_tree_come_together():
    tree = {"a": array(3, 8), "b": array(8), "c": array(8)}
    found = lines(tree, {"a": ("mlp", "hed"), "b": ("embed", None)})
    assert [line.split(":")[0] for line in found] == ["a", "b", "c"]
    found = lines(tree, {"a": ("mlp", "embed"), "b": ("heads",), "c": ("heads",)}, mesh=shape_of(tensor=16, fsdp=16))
    assert [line.split(":")[0] for line in found] == ["a", "a", "b and 1 more"]


OPTIONS = {"heads": ("model.num_heads", 4), "mlp": ("model.mlp_dim", 510), "vocab": ("model.vocab_multiple", 128)}


def test_equal_dims_are_one_line_that_names_the_option_and_one_size_of_the_axis_for_all():
    tree = {"query": array(8, 4, 2), "output": array(4, 2, 8), "up": array(8, 510), "table": array(384, 8)}
    names = {
        "query": ("embed", "heads", "head_dim"),
        "output": ("heads", "head_dim", "embed"),
        "up": ("embed", "mlp"),
        "table": ("vocab", "embed"),
    }
    heads, table, mlp = sorted(lines(tree, names, mesh=shape_of(tensor=7), options=OPTIONS), key=lambda line: line[:12])
    assert mlp == (
        "model.vocab_multiple: got 128, which makes 384, for dim 'vocab' of table; allowed: a multiple of 7, "
        "because it is split over mesh.tensor = 7; nearest: 126, or mesh.tensor=2"
    )
    assert heads == (
        "model.mlp_dim: got 510 for dim 'mlp' of up; allowed: a multiple of 7, because it is split over mesh.tensor = "
        "7; "
        "nearest: 511, or mesh.tensor=2"
    )
    assert table == (
        "model.num_heads: got 4 for dim 'heads' of output and 1 more; allowed: a multiple of 7, because it is "
        "split over mesh.tensor = 7; nearest: 7, or mesh.tensor=2"
    )


def test_an_option_of_another_size_is_not_named():
    (line,) = lines({"w": array(6, 8)}, {"w": ("heads", "embed")}, mesh=shape_of(tensor=4), options=OPTIONS)
    assert line.startswith("w: shape (6, 8): dim 0 has size 6")


def test_sizes_checked_elsewhere_are_left_out():
    tree, names = {"w": array(3, 8)}, {"w": ("layers", "embed")}
    assert lines(tree, names)
    assert lines(tree, names, elsewhere=("layers",)) == []


UNEVEN = {"up": array(4, 100, 300), "down": array(4, 300, 100), "norm": array(4, 100)}
UNEVEN_NAMES = {"up": ("layers", "embed", "mlp"), "down": ("layers", "mlp", "embed"), "norm": ("layers", "norm")}


@pytest.mark.parametrize(
    "level, what", [(1, "moments"), (2, "moments and gradient sums"), (3, "weights, gradients and moments")]
)
def test_a_level_that_splits_nothing_is_an_error_with_the_nearest_sizes(level, what):
    (line,) = lines(UNEVEN, UNEVEN_NAMES, mesh=shape_of(data=8), level=level)
    assert line == (
        f"mesh.data: got 8 at ZeRO level {level}, but 8 divides no dim of down (4, 300, 100), up (4, 100, 300): the "
        f"{what} of 100% of the bytes of all matrices would be replicated on each device; allowed: at most 1%; "
        "nearest: "
        "mesh.data=10, or down of shape (4, 304, 100)"
    )
    assert lines(UNEVEN, UNEVEN_NAMES, mesh=shape_of(data=8)) == []
    assert lines(UNEVEN, UNEVEN_NAMES, mesh=shape_of(data=10), level=level) == []


def test_what_other_axes_split_counts():
    tree, names = {"w": array(100, 7)}, {"w": ("embed", None)}
    (line,) = lines(tree, names, mesh=shape_of(data=20, fsdp=10), level=1)
    assert line.endswith("nearest: mesh.data=10, or w of shape (200, 7)")
    assert lines(tree, names, mesh=shape_of(data=20), level=1) == []


@pytest.mark.parametrize("whole, legal", [(15, True), (17, False)])
def test_one_percent_of_the_matrices_may_stay_whole(whole, legal):
    """49 x 15 of 79,880 + 735 numbers are 0.9 %, 49 x 17 are 1.03 %; norms and biases do not count."""
    tree = {"even": array(10_000 - whole, 8), "odd": array(7, whole, 7), "bias": array(7, 9, 9), "norm": array(7, 999)}
    names = {
        "even": (None, None),
        "odd": ("layers", None, None),
        "bias": ("layers", "heads", "head_dim"),
        "norm": ("layers", "norm"),
    }
    found = lines(tree, names, mesh=shape_of(data=8), level=3)
    assert (found == []) == legal


def test_frozen_weights_have_no_moments_to_split():
    trained = {"up": False, "down": False, "norm": True, "even": True}
    tree, names = UNEVEN | {"even": array(8, 8)}, UNEVEN_NAMES | {"even": ("embed", "mlp")}
    assert lines(tree, names, mesh=shape_of(data=8), level=1)
    assert lines(tree, names, mesh=shape_of(data=8), level=1, trained=trained) == []
    assert lines(tree, names, mesh=shape_of(data=8), level=3, trained=trained)


def test_fsdp_that_no_rule_lets_split_is_an_error_unless_it_was_chosen():
    tree, names = {"w": array(8, 8), "norm": array(8)}, {"w": (None, "mlp"), "norm": ("norm",)}
    (line,) = lines(tree, names, mesh=shape_of(fsdp=2))
    assert line == (
        "mesh.fsdp: got 2, but no rule splits w (8, 8) over fsdp: 100% of the bytes of all matrices would be "
        "replicated on each device; allowed: at most 1%; nearest: mesh.fsdp=1, or a dim with the logical axis "
        "'embed'"
    )
    assert lines(tree, names, extend(RULES, Rule("mlp", ("tensor",))), mesh=shape_of(fsdp=2)) == []
