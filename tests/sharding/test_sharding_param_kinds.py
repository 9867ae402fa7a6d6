"""What decays, what is a matrix and which of its dims are reduced, for every kind of weight."""

import pytest

from meshtrain.sharding.param_kinds import MatrixDims, decays, is_hidden_matrix, matrix_dims, num_stacked

pytestmark = pytest.mark.quick

# axes, dims as a matrix, hidden
WEIGHTS = [
    (("layers", "embed", "heads", "head_dim"), MatrixDims((1,), (2, 3)), True),
    (("layers", "embed", "kv_heads", "head_dim"), MatrixDims((1,), (2, 3)), True),
    (("layers", "heads", "head_dim", "embed"), MatrixDims((1, 2), (3,)), True),
    (("layers", "embed", "mlp"), MatrixDims((1,), (2,)), True),
    (("chunks", "layers", "mlp", "embed"), MatrixDims((2,), (3,)), True),
    (("embed", "mlp"), MatrixDims((0,), (1,)), True),
    (("layers", "experts", "expert_embed", "expert_mlp"), MatrixDims((2,), (3,)), True),
    (("chunks", "layers", "experts", "expert_mlp", "expert_embed"), MatrixDims((3,), (4,)), True),
    (("layers", "embed", "router"), MatrixDims((1,), (2,)), False),
    (("layers", "router"), None, False),
    (("layers", "embed", None, "heads", "head_dim"), MatrixDims((1,), (2, 3, 4)), True),
    ((None, None, None, None), MatrixDims((0, 1, 2), (3,)), True),
    (("vocab", "embed"), MatrixDims((0,), (1,)), False),
    (("embed", "vocab"), MatrixDims((0,), (1,)), False),
    (("positions", "embed"), MatrixDims((0,), (1,)), False),
    (("layers", "norm"), None, False),
    (("chunks", "layers", "norm"), None, False),
    (("norm",), None, False),
    (("layers", "heads", "norm"), None, False),
    (("layers", "mlp"), None, False),
    (("layers", "heads", "head_dim"), None, False),
    (("heads", "head_dim"), None, False),
    (("layers", "head_dim"), None, False),
    (("layers",), None, False),
    ((), None, False),
]


@pytest.mark.parametrize("axes, dims, hidden", WEIGHTS, ids=lambda value: str(value))
def test_each_kind_of_weight(axes, dims, hidden):
    assert matrix_dims(axes) == dims
    assert is_hidden_matrix(axes) == hidden
    assert decays({"weight": axes}) == {"weight": dims is not None}


def test_decays_has_the_structure_of_the_parameters():
    axes = {"head": {"norm": {"scale": ("norm",)}, "kernel": ("embed", "vocab")}, "temperature": ()}
    assert decays(axes) == {"head": {"norm": {"scale": False}, "kernel": True}, "temperature": False}


def test_only_names_at_the_front_stack():
    assert num_stacked(("chunks", "layers", "embed")) == 2
    assert num_stacked(("embed", "layers")) == 0
    assert num_stacked(("layers",)) == 1
    assert num_stacked(()) == 0
