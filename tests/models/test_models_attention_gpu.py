"""Attention with documents, compiled for GPUs without one: `scripts/test --plan` runs this."""

import pytest

from meshtrain.plan import flops, hlo
from meshtrain.plan.topology import open_cluster
from scripts import attention_memory
from scripts.attention_memory import compiled, temporary_bytes

pytestmark = pytest.mark.gpu_compiler


@pytest.mark.parametrize("way", ["triton", "blockwise"])
def test_memory_with_documents_grows_with_the_length(way):
    cluster = open_cluster("h100:1x1")
    short, long = (temporary_bytes(compiled(way, length, cluster)) for length in (4096, 16384))
    assert long <= 4.01 * short


@pytest.mark.parametrize(("card", "head_dim"), [("h100", 64), ("a100", 128), ("a100", 256)])
def test_the_kernel_fits_into_the_shared_memory_of_the_card_and_its_work_is_counted(card, head_dim):
    length = 1024
    program = compiled("triton", length, open_cluster(f"{card}:1x1"), head_dim)
    work = flops.matmul_flops(hlo.read(program.as_text()))
    assert work.attention_full == (2 + 7) * 2 * attention_memory.NUM_HEADS * length**2 * head_dim
    assert work.products == 0
    # Blocks on the diagonal are computed whole.
    assert 0.5 < work.attention / work.attention_full < 0.57
