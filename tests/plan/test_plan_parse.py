"""The reader of compiled programs: each trap that a reader of such text falls into, on text as a compiler wrote it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.core import meta

from meshtrain.models.task import SEQUENCE_INDEX
from meshtrain.models.transformer.decoder import DecoderOptions
from meshtrain.models.transformer.task import decoder
from meshtrain.plan.cluster.traced_flops import traced_flops
from meshtrain.plan.cost.memory import largest_buffers
from meshtrain.plan.hlo import flops, parse, replica_groups, shapes
from meshtrain.plan.hlo.collectives import collectives, traffic
from meshtrain.plan.timing.streams import Assumptions, Streams
from meshtrain.sharding.rules import AXES
from tests.plan import counted, recorded
from tests.plan.conftest import H100

MESH = dict.fromkeys(AXES, 1) | {"data": 2, "fsdp": 4}


def found(*lines, before=recorded.SUM, mesh=MESH):
    return collectives(parse.read(recorded.entry(*lines, before=before)), mesh)


def test_nested_loops_multiply():
    program = parse.read(recorded.GPU_LOOPS)
    assert program.num_runs["inner_body"] == 15
    assert flops.matmul_flops(program).total == 15 * 2 * 8 * 16 * 16


def test_a_loop_without_annotation_is_counted_from_start_bound_and_step():
    program = parse.read(recorded.TPU_LOOP)
    assert program.num_runs["body"] == 5  # 0, 2, 4, 6, 8
    assert flops.matmul_flops(program).total == 5 * 2 * 8 * 16 * 16


def test_a_counter_may_be_copied_on_its_way():
    step = "  %copy.2 = s32[]{:T(128)} copy(%fusion.1)\n  ROOT %t ="
    text = recorded.TPU_LOOP.replace("  ROOT %t =", step).replace("tuple(%fusion.1,", "tuple(%copy.2,")
    assert parse.read(text).num_runs["body"] == parse.read(recorded.TPU_LOOP).num_runs["body"] > 1


def test_a_loop_of_unknown_length_is_refused():
    text = recorded.TPU_LOOP.replace("direction=LT", "direction=NE")
    with pytest.raises(ValueError, match=r"%while\.1: a loop of unknown length"):
        parse.read(text)


def test_text_that_is_no_program_is_refused():
    with pytest.raises(ValueError, match="no ENTRY"):
        parse.read("HloModule jit_step\n")


def test_a_tuple_shaped_all_reduce_counts_all_its_arrays():
    (one,) = found(
        "%x = f32[8]{0} parameter(0)",
        "%y = bf16[4,4]{1,0:T(8,128)(2,1)} parameter(1)",
        "%all-reduce = (f32[8]{0}, /*index=1*/bf16[4,4]{1,0:T(8,128)(2,1)}) all-reduce(%x, %y), "
        "replica_groups=[2,4]<=[8], to_apply=%sum",
    )
    assert (one.kind, one.axes, one.logical_bytes) == ("all-reduce", "fsdp", 8 * 4 + 16 * 2)
    assert one.wire_bytes == 2 * 3 / 4 * (32 + 32)


def test_grouped_starts_count_their_results_and_pairs_count_once():
    start, product, done = (
        "%all-gather-start = ((bf16[2,8]{1,0}, bf16[4]{0}), (bf16[8,8]{1,0}, bf16[16]{0})) all-gather-start(%x, %y), "
        "replica_groups=[2,4]<=[8], dimensions={0}",
        "%dot = f32[8,8]{1,0} dot(%w, %w), lhs_contracting_dims={1}, rhs_contracting_dims={0}",
        "%all-gather-done = (bf16[8,8]{1,0}, bf16[16]{0}) all-gather-done(%all-gather-start)",
    )
    arguments = (
        "%x = bf16[2,8]{1,0} parameter(0)",
        "%y = bf16[4]{0} parameter(1)",
        "%w = f32[8,8]{1,0} parameter(2)",
    )
    (hidden,) = found(*arguments, start, product, done)
    assert (hidden.logical_bytes, hidden.count) == ((64 + 16) * 2, 1)
    assert hidden.is_asynchronous
    assert hidden.is_overlapped
    for lines in ((product, start, done), (start, done, product)):
        (bare,) = found(*arguments, *lines)
        assert bare.is_asynchronous
        assert not bare.is_overlapped


def test_a_start_that_says_is_sync_is_not_asynchronous():
    (one,) = found(
        "%x = f32[8]{0} parameter(0)",
        "%all-reduce-start = f32[8]{0} all-reduce-start(%x), replica_groups=[2,4]<=[8], to_apply=%sum, "
        'backend_config={"collective_backend_config":{"is_sync":true}}',
        "%w = f32[8,8]{1,0} parameter(1)",
        "%dot = f32[8,8]{1,0} dot(%w, %w), lhs_contracting_dims={1}, rhs_contracting_dims={0}",
        "%all-reduce-done = f32[8]{0} all-reduce-done(%all-reduce-start)",
    )
    assert not one.is_asynchronous
    assert not one.is_overlapped


def test_a_collective_in_an_async_start_counts_once():
    wrapped = recorded.SUM + (
        "\n%wrapped (p: f32[8]) -> f32[2] {\n  %p = f32[8]{0} parameter(0)\n"
        "  ROOT %reduce-scatter = f32[2]{0} reduce-scatter(%p), replica_groups={{0,1,2,3},{4,5,6,7}}, dimensions={0}, "
        "to_apply=%sum\n}\n"
    )
    (one,) = found(
        "%x = f32[8]{0} parameter(0)",
        "%async-start = ((f32[8]{0}), f32[2]{0}, s32[]) async-start(%x), calls=%wrapped",
        "%w = f32[8,8]{1,0} parameter(1)",
        "%dot = f32[8,8]{1,0} dot(%w, %w), lhs_contracting_dims={1}, rhs_contracting_dims={0}",
        "%async-done = f32[2]{0} async-done(%async-start)",
        before=wrapped,
    )
    assert (one.kind, one.count, one.logical_bytes, one.wire_bytes) == ("reduce-scatter", 1, 32, 24)
    assert one.is_overlapped


def test_a_tpu_chain_is_one_gather_and_a_kept_slice_makes_a_scatter():
    program = parse.read(recorded.SUM.join(["", recorded.TPU_CHAIN]))
    gather, scatter = collectives(program, dict.fromkeys(AXES, 1) | {"fsdp": 8})
    assert (gather.kind, gather.count, gather.logical_bytes) == ("all-gather", 1, 2048 * 64 * 2)
    assert gather.is_asynchronous
    assert gather.is_overlapped
    assert (scatter.kind, scatter.logical_bytes, scatter.wire_bytes) == ("reduce-scatter", 512, 448)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("replica_groups={{0,1},{2,3}}", [[0, 1], [2, 3]]),
        ("replica_groups={}", [[0, 1, 2, 3]]),
        ("replica_groups=[2,2]<=[4]", [[0, 1], [2, 3]]),
        ("replica_groups=[2,2]<=[2,2]T(1,0)", [[0, 2], [1, 3]]),
        ("replica_groups=mesh['a'=2,'b'=2] {'b'}", [[0, 1], [2, 3]]),
        ("replica_groups=mesh['a'=2,'b'=2] {'a'}", [[0, 2], [1, 3]]),
        ("replica_groups=mesh['a'=2,'b'=2] {'a','b'}", [[0, 1, 2, 3]]),
        ("replica_groups=mesh['a'=2,'b'=2], device_ids=([2,2]T(1,0)) {'b'}", [[0, 2], [1, 3]]),
        ("replica_groups=mesh['a'=4] {'a':(1)2}", [[0, 2], [1, 3]]),
        ("source_target_pairs={{0,2},{2,0}}", [[0, 2], [2, 0]]),
    ],
)
def test_each_syntax_of_replica_groups(text, expected):
    assert replica_groups.replica_groups(f"channel_id=1, {text}, dimensions={{0}}", 4).tolist() == expected


def test_an_unknown_syntax_of_replica_groups_is_refused():
    with pytest.raises(ValueError, match="unknown replica groups"):
        replica_groups.replica_groups("replica_groups=@mesh<a>", 4)


@pytest.mark.parametrize(
    ("members", "axes"),
    [
        ([[0, 4]], "data"),
        ([[0, 1, 2, 3]], "fsdp"),
        ([[0, 1, 2, 3, 4, 5, 6, 7]], "data+fsdp"),
        ([[0], [1]], ""),
        ([[0, 1]], "irregular"),
    ],
)
def test_groups_are_named_by_the_axes_they_run_along(members, axes):
    assert replica_groups.axes_of(np.array(members), MESH) == axes


def test_a_permute_is_named_by_the_axis_it_sends_along_and_counts_each_send():
    (one,) = found(
        "%x = bf16[8]{0} parameter(0)",
        "%collective-permute-start = (bf16[8]{0}, bf16[8]{0}, u32[], u32[]) collective-permute-start(%x), "
        "source_target_pairs={{0,1},{1,2},{2,3},{3,0},{4,5},{5,6},{6,7},{7,4}}",
        "%collective-permute-done = bf16[8]{0} collective-permute-done(%collective-permute-start)",
    )
    assert (one.axes, one.wire_bytes) == ("fsdp", 16)


def test_groups_of_one_device_are_left_out():
    assert not found(
        "%x = f32[8]{0} parameter(0)",
        "%all-reduce = f32[8]{0} all-reduce(%x), replica_groups={{0},{1},{2},{3},{4},{5},{6},{7}}, to_apply=%sum",
    )


def test_traffic_sums_by_axis_and_kind():
    lines = [f"%x.{i} = f32[{8 * i}]{{0}} parameter({i})" for i in (1, 2)]
    reduces = [
        f"%all-reduce.{i} = f32[{8 * i}]{{0}} all-reduce(%x.{i}), replica_groups=[2,4]<=[8], to_apply=%sum"
        for i in (1, 2)
    ]
    (row,) = traffic(found(*lines, *reduces))
    assert (row.axis, row.kind, row.count, row.logical_bytes) == ("fsdp", "all-reduce", 2, 96)
    assert row.asynchronous_fraction == 0


@pytest.mark.parametrize(
    ("line", "left", "right", "expected"),
    [
        # As TPU programs write products over two dims: what falls on padding is no work.
        (
            "f32[4,128,2,32]{1,3,2,0} convolution(%x, %w), window={size=1x2 pad=0_0x1_1 rhs_reversal=0x1}, "
            "dim_labels=0bf1_i1o0->0b1f",
            "f32[4,128,128,1]", "f32[128,2,32,1]", 2 * 4 * 128 * 2 * 32 * 128,
        ),
        (
            "bf16[8192,8,64]{0,2,1} convolution(%x, %w), window={size=8 pad=7_7 rhs_reversal=1}, "
            "dim_labels=bf0_i0o->b0f",
            "bf16[8192,2048,1]", "bf16[2048,8,64]", 2 * 8192 * 2048 * 8 * 64,
        ),
        (
            "f32[4,2,128,128]{2,3,1,0} convolution(%x, %w), window={size=4x2 stride=3x1 lhs_dilate=4x2}, "
            "dim_labels=0b1f_0o1i->01bf",
            "f32[4,128,2,32]", "f32[4,128,2,32]", None,
        ),
        ("f32[8,4]{1,0} convolution(%x, %w), dim_labels=bf_io->bf", "f32[8,16]", "f32[16,4]", 2 * 8 * 4 * 16),
    ],
)  # fmt: skip
def test_a_convolution_counts_the_product_it_stands_for(line, left, right, expected):
    text = recorded.entry(f"%x = {left}{{0}} parameter(0)", f"%w = {right}{{0}} parameter(1)", f"%c = {line}")
    counted = flops.matmul_flops(parse.read(text)).total
    # Batch of 4 in a dilated dim, heads of 2 in another: 128 x 128 x 32 for each.
    assert counted == (expected or 2 * 4 * 2 * 128 * 128 * 32)


ATTENTION = (
    '%attention = (bf16[2,8,64,16]{3,1,2,0}, f32[2,8,64]{2,1,0}, u8[0]{0}) custom-call(%q, %k, %k), '
    'custom_call_target="__cudnn$fmhaSoftmax", backend_config={"cudnn_fmha_backend_config": '
    '{"intermediate_tensor_shape": {"element_type": "BF16", "dimensions": ["2", "8", "64", "64"], "layout": {}}, '
    '"mask_type": "CAUSAL"}}'
)  # fmt: skip


@pytest.mark.parametrize(
    ("line", "full", "share"),
    [
        (ATTENTION, 4, 0.5),
        (ATTENTION.replace("CAUSAL", "NO_MASK"), 4, 1.0),
        (ATTENTION.replace("CAUSAL", 'CAUSAL", "sliding_window_length": "16'), 4, 16 * (64 + 48) / 2 / 64**2),
        (ATTENTION.replace("CAUSAL", 'CAUSAL", "sliding_window_length": "0'), 4, 0.5),
        (ATTENTION.replace("fmhaSoftmax", "fmhaSoftmaxBackward"), 10, 0.5),
    ],
)
def test_attention_kernels_are_counted_by_formula(line, full, share):
    arguments = ("%q = bf16[2,64,8,16]{3,2,1,0} parameter(0)", "%k = bf16[2,64,8,16]{3,2,1,0} parameter(1)")
    work = flops.matmul_flops(parse.read(recorded.entry(*arguments, line)))
    assert work.attention_full == full * 2 * 8 * 64 * 64 * 16
    assert work.attention == share * work.attention_full


# As libtpu writes it: metadata on lines of its own, and a stack frame after them.
SPLASH = """\
%splash_mha_dkv_segmented_no_residuals.1 = (f32[64,16]{1,0}, bf16[2,4,256,16]{3,2,1,0}) \
custom-call(%mask, %q, %k, %k, /*index=4*/%ids), custom_call_target="tpu_custom_call", \
frontend_attributes={kernel_metadata={
"xprof_metadata":"{\\"block_q_dkv\\": 64, \\"block_kv_dkv\\": 64}"
}}, metadata={op_name="jit(step)/splash_mha_dkv_segmented_no_residuals/pallas_call" stack_frame_id=4}"""
SPLASH_ARGUMENTS = (
    "%mask = s8[1,4,4]{2,1,0} parameter(0)",
    "%q = bf16[2,4,256,16]{3,2,1,0} parameter(1)",
    "%k = bf16[2,2,256,16]{3,2,1,0} parameter(2)",
    "%ids = s32[8,256]{1,0} parameter(3)",
)


@pytest.mark.parametrize(
    ("line", "products"),
    [
        (SPLASH, 4),
        (SPLASH.replace("%splash_mha_dkv_segmented_no_residuals.1", "%custom-call.7"), 4),
        (SPLASH.replace("mha_dkv_segmented_no", "mqa_fwd"), 2),
        (SPLASH.replace("_dkv", "_dq"), 3),
        (SPLASH.replace("splash", "another"), 0),
    ],
)
def test_a_tpu_s_kernel_is_counted_by_its_name(line, products):
    program = parse.read(recorded.entry(*SPLASH_ARGUMENTS, line) + recorded.SOURCES)
    work = flops.matmul_flops(program)
    assert work.attention_full == products * 2 * 2 * 4 * 256 * 256 * 16
    assert work.attention == work.attention_full * 10 / 16  # of 4 x 4 blocks
    (call,) = [row[0] for row in program.instructions("custom-call")]
    assert program.source(call) == "meshtrain/sharding/placement.py:89"


def test_a_tpu_s_kernel_skips_blocks_outside_of_a_window():
    arguments = ("%mask = s8[1,2,4]{2,1,0} parameter(0)", *SPLASH_ARGUMENTS[1:])
    work = flops.matmul_flops(parse.read(recorded.entry(*arguments, SPLASH)))
    assert work.attention == work.attention_full * (1 + 2 + 2 + 2) / 16


TRITON = """\
%call.1 = (bf16[2,256,4,16]{3,2,1,0}, f32[2,4,256]{2,1,0}) custom-call(%q, %k, %k, %ids), \
custom_call_target="__gpu$xla.gpu.triton", metadata={op_name="jit(step)/triton_causal/mha_forward/pallas_call"}, \
backend_config={debug = false, grid_x = 2 : i32, grid_y = 2 : i32, grid_z = 4 : i32}"""
TRITON_ARGUMENTS = (
    "%q = bf16[2,256,4,16]{3,2,1,0} parameter(0)",
    "%k = bf16[2,256,4,16]{3,2,1,0} parameter(1)",
    "%ids = s32[2,256]{1,0} parameter(2)",
)


@pytest.mark.parametrize(
    ("line", "products", "share"),
    [
        (TRITON, 2, 3 / 4),
        (TRITON.replace("triton_causal", "triton_full"), 2, 1),
        (TRITON.replace("triton_causal/mha_forward", "transpose(triton_causal)/jit(mha_backward)"), 7, 5 / 8),
        (TRITON.replace("mha_forward", "mha_preprocess_backward"), 0, 1),
    ],
)
def test_jax_s_kernel_for_gpus_is_counted_by_its_grid(line, products, share):
    work = flops.matmul_flops(parse.read(recorded.entry(*TRITON_ARGUMENTS, line)))
    assert work.attention_full == products * 2 * 2 * 4 * 256 * 256 * 16
    assert work.attention == share * work.attention_full


SCORES = """\
%same_document (scores: f32[2,4,256,256], of_queries: f32[2,1,256,1], of_keys: f32[2,1,1,256]) -> f32[2,4,256,256] {
  %scores = f32[2,4,256,256]{3,2,1,0} parameter(0)
  %of_queries = f32[2,1,256,1]{3,2,1,0} parameter(1)
  ROOT %dot.1 = f32[2,4,256,256]{3,2,1,0} dot(%scores, %scores), lhs_batch_dims={0,1}, rhs_batch_dims={0,1}, \
lhs_contracting_dims={3}, rhs_contracting_dims={2}
}
"""
FLEX_ARGUMENTS = (*TRITON_ARGUMENTS[:2], "%ids = f32[2,1,256,1]{3,2,1,0} parameter(2)")
FLEX = (
    "%call.1 = (bf16[2,4,256,16]{3,1,2,0}, f32[2,4,256]{2,1,0}, u8[0]{0}) custom-call(%q, %k, %k, %ids), "
    'custom_call_target="__cudnn$fmhaSoftmax", called_computations={%same_document}, backend_config='
    '{"cudnn_fmha_backend_config": {"intermediate_tensor_shape": {"element_type": "BF16", "dimensions": '
    '["2", "4", "256", "256"]}, "mask_type": "CAUSAL", "sliding_window_length": 0}}'
)


def test_a_score_function_describes_a_kernel_and_is_neither_run_nor_a_buffer():
    program = parse.read(recorded.entry(*FLEX_ARGUMENTS, FLEX, before=SCORES))
    work = flops.matmul_flops(program)
    assert (work.products, work.attention_full) == (0, 2 * 2 * 2 * 4 * 256 * 256 * 16)
    assert program.num_runs["same_document"] == 0
    assert max(buffer.num_bytes for buffer in largest_buffers(program)) == 2 * 256 * 4 * 16 * 2
    walked = Streams(program, H100, {}, Assumptions())
    seconds, _, _ = walked.step()
    assert seconds < 1e-4  # the matrix of scores alone would take longer
    assert "same_document" not in walked.seconds


def test_a_library_s_product_is_counted_and_an_unknown_one_refused():
    line = (
        '%gemm = (bf16[8,4]{1,0}, s8[64]{0}) custom-call(%x, %w), custom_call_target="__cublas$gemm", '
        'backend_config={"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"]}}}'
    )
    arguments = ("%x = bf16[8,16]{1,0} parameter(0)", "%w = bf16[16,4]{1,0} parameter(1)")
    assert flops.matmul_flops(parse.read(recorded.entry(*arguments, line))).total == 2 * 8 * 4 * 16
    with pytest.raises(ValueError, match="%gemm: a matrix product whose dims are not known"):
        flops.matmul_flops(parse.read(recorded.entry(*arguments, line.replace("lhs_contracting", "other"))))


def test_the_source_is_the_line_that_asked():
    line = '%x = f32[8]{0} parameter(0), metadata={op_name="x" stack_frame_id=4}'
    text = recorded.entry(line) + recorded.SOURCES

    def source(*is_helper):
        program = parse.read(text, *is_helper)
        ((parameter, _, _),) = [row for row in program.instructions("parameter") if row[0].name == "x"]
        return program.source(parameter)

    assert source() == "meshtrain/sharding/placement.py:89"
    assert source(lambda file, _: "placement" in file) == "meshtrain/models/layers.py:34"
    assert source(lambda file, name: "placement" in file or name == "weight") == "meshtrain/models/layers.py:83"


@pytest.mark.parametrize(
    ("shape", "size"),
    [("f32[4,8]{1,0}", 128), ("bf16[3]", 6), ("pred[]", 1), ("s4[8]", 4), ("f8e4m3fn[2,2]{1,0}", 4), ("token[]", 0),
     ("((bf16[2]), f32[2]{0:T(128)})", 12)],
)  # fmt: skip
def test_bytes_of_shapes(shape, size):
    assert shapes.num_bytes(shape) == size


def test_copies_of_arrays_in_loops_are_found():
    body = "  %copy.1 = f32[8,16]{0,1} copy(%x)\n  ROOT %t ="
    program = parse.read(recorded.GPU_LOOPS.replace("  ROOT %t =", body, 1))
    assert counted.copies_in_loops(program, {("f32", (8, 16))}) == ["copy.1"]
    assert counted.copies_in_loops(program, {("f32", (16, 8))}) == []


def test_transfers_are_counted_with_their_loops():
    line = "  %collective-permute = f32[8,16]{1,0} collective-permute(%x), source_target_pairs={{0,1}}\n  ROOT %t ="
    program = parse.read(recorded.GPU_LOOPS.replace("  ROOT %t =", line, 1))
    assert counted.num_transfers(program, "collective-permute") == 15


def test_a_branch_counts_for_the_layers_that_take_it():
    """One of four layers has three products, the others one; and twice as many more in the backward pass."""

    def loss(x, w, layers):
        def layer(x, index):
            branches = (lambda x: x @ w @ w @ w), (lambda x: x @ w)
            return jax.named_scope("quarter")(jax.lax.cond)((index + 1) % 4 == 0, *branches, x), None

        return jax.lax.scan(layer, x, layers)[0].sum()

    size = 16
    given = (*(jax.ShapeDtypeStruct((size, size), jnp.float32),) * 2, jax.ShapeDtypeStruct((4,), jnp.int32))
    step = jax.value_and_grad(loss, argnums=1)
    text, jaxpr = jax.jit(step).lower(*given).compile().as_text(), jax.make_jaxpr(step)(*given).jaxpr
    for shares, products in (
        ({"quarter": 0.25}, 3 * 1 + 3),
        ({}, 4 * (1 + 3)),
    ):  # all layers run both if nothing is known
        assert flops.matmul_flops(parse.read(text, shares=shares)).total == 3 * products * 2 * size**3
        assert traced_flops(jaxpr, {}, shares) == 3 * products * 2 * size**3


def test_the_decoder_s_cost_has_the_share_of_its_branches():
    def traced(every):
        options = DecoderOptions(
            num_layers=3, num_heads=2, num_kv_heads=2, embed_dim=16, mlp_dim=16, vocab_size=9, vocab_multiple=16,
            window=100, global_every=every, attention="splash",
        )  # fmt: skip
        task = decoder(options, batch_size=1, sequence_length=128)
        params = meta.unbox(jax.eval_shape(task.init, jax.random.key(0)))
        batch = {**task.batch, SEQUENCE_INDEX: jax.ShapeDtypeStruct((1,), jnp.int32)}
        batch = {name: jax.ShapeDtypeStruct(entry.shape, entry.dtype) for name, entry in batch.items()}
        shares = task.cost(dict.fromkeys(AXES, 1), 128).shares
        return traced_flops(jax.make_jaxpr(task.logits)(params, batch).jaxpr, {}, shares)

    # The kernel counts in full with a window, too.
    assert traced(2) == pytest.approx(traced(0), rel=1e-12)
