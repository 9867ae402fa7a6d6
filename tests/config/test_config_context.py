"""What does not go with sequences that are split over devices."""

import pytest

from meshtrain.config.config import resolve
from meshtrain.words.errors import UserError

CASES = {
    "a batch without sequences": (
        {"task": "convnet", "data.source": "digits", "mesh.context": "2"},
        "mesh.context: got 2, and no entry of this task's batch has a dim 'sequence'; allowed: 1; "
        "nearest: mesh.context=1",
    ),
    "tokens": (
        {"mesh.context": "4", "sequence_length": "254"},
        "sequence_length: got 254; allowed: a multiple of 4, as rule 'residual_sequence' splits it over "
        "mesh.context = 4; nearest: 256",
    ),
    "tokens between layers": (
        {"mesh.context": "4", "mesh.tensor": "2", "layout.sequence_parallel": "true", "sequence_length": "252"},
        "sequence_length: got 252; allowed: a multiple of 8, as rule 'residual_sequence' splits it over "
        "mesh.context = 4 x mesh.tensor = 2; nearest: 256",
    ),
    "tokens of a source": (
        {"task": "seq2seq", "data.source": "numbers", "mesh.context": "2", "model.source_length": "33"},
        "model.source_length: got 33; allowed: a multiple of 2, as rule 'residual_sequence' splits it over "
        "mesh.context = 2; nearest: 34",
    ),
    "weights": (
        {
            "mesh.context": "4",
            "mesh.fsdp": "2",
            "model.embed_dim": "132",
            "model.num_heads": "2",
            "model.num_kv_heads": "2",
        },
        "model.embed_dim: got 132 for dim 'embed' of embedding/table and 8 more; allowed: a multiple of 8, as it is "
        "split over mesh.fsdp = 2 x mesh.context = 4; nearest: 136, or mesh.fsdp x mesh.context = 6",
    ),
}


@pytest.mark.parametrize(("overrides", "line"), CASES.values(), ids=list(CASES))
def test_contradictions_are_one_line_before_compiling(overrides, line):
    with pytest.raises(UserError) as caught:
        resolve({}, overrides)
    assert caught.value.problems == (line,)
