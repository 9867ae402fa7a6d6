"""What the shape of a matrix product costs, and how its dims are read."""

import pytest

from meshtrain.plan.hlo import parse
from meshtrain.plan.hlo.products import Product, product_of
from meshtrain.plan.timing import streams
from tests.plan import recorded

UNITS = 108  # an A100's


def share(rows, columns, contracted, batch=1):
    return streams.shape_share(Product(batch, rows, columns, contracted), UNITS)


def test_a_large_product_costs_nothing_beyond_filling_its_pipelines():
    # 54 x 64 tiles of 256 x 128 are 32 whole waves.
    assert share(54 * 256, 64 * 128, 8192) == pytest.approx(8192 / (8192 + streams.FILLING))


def test_zeros_in_tiles_and_empty_places_in_the_last_wave_are_lost():
    whole = share(1024, 108 * 128, 8192)
    # One row more is another row of tiles, of which the smallest is 64 rows high.
    assert share(1025, 108 * 128, 8192) < 0.98 * whole
    # 108 tiles are one wave. One tile more is another wave; smaller tiles or a split contraction lose less than half.
    assert 0.5 * whole < share(256, 109 * 128, 8192) < 0.97 * share(256, 108 * 128, 8192)


def test_thin_short_and_small_products_are_slower():
    large = share(8192, 8192, 8192)
    for rows, columns, contracted in ((16, 8192, 8192), (8192, 8192, 64), (256, 256, 256)):
        assert share(rows, columns, contracted) < 0.6 * large
    # Eight heads at once fill units that one leaves empty.
    assert share(512, 512, 512, batch=8) > 1.7 * share(512, 512, 512)
    # A long contraction is split where the result has few tiles.
    unsplit = 32 / UNITS * streams.TILES[128, 128]
    assert share(1024, 512, 65536) > 2 * unsplit


def test_where_the_units_are_not_known_every_shape_is_as_fast():
    assert streams.shape_share(Product(1, 8, 8, 8), 0) == 1.0


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (
            "%dot = f32[4,16,64]{2,1,0} dot(%a, %b), lhs_batch_dims={0}, lhs_contracting_dims={2}, "
            "rhs_batch_dims={0}, rhs_contracting_dims={1}",
            Product(4, 16, 64, 32),
        ),
        (
            '%gemm = (f32[4,16,64]{2,1,0}, s8[1024]{0}) custom-call(%a, %b), custom_call_target="__cublas$gemm", '
            'backend_config={"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["2"],'
            '"rhs_contracting_dimensions":["1"],"lhs_batch_dimensions":["0"],"rhs_batch_dimensions":["0"]}}}',
            Product(4, 16, 64, 32),
        ),
        ("%add = f32[4,16,32]{2,1,0} add(%a, %a)", None),
    ],
)
def test_dims_are_read_from_dots_and_from_calls_of_libraries(line, expected):
    arguments = ("%a = f32[4,16,32]{2,1,0} parameter(0)", "%b = f32[4,32,64]{2,1,0} parameter(1)")
    body = list(parse.read(recorded.entry(*arguments, line)).computations.values())[-1]
    shapes = {one.name: one.shape for one in body}
    assert product_of(body[-1], shapes, {}) == expected
