"""Pieces of programs as compilers wrote them, cut down to what each test is about."""

SUM = """\
%sum (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %add = f32[] add(%a, %b)
}
"""


def entry(*lines: str, before: str = SUM) -> str:
    """Returns a program whose entry holds these lines, the last of them its result."""
    body = [*lines[:-1], f"ROOT {lines[-1]}"]
    inside = "\n".join(f"  {line}" for line in body)
    return f"HloModule jit_step, is_scheduled=true\n\n{before}\nENTRY %main (p: f32[]) -> f32[] {{\n{inside}\n}}\n"


# Two loops in each other, their lengths annotated, as GPU programs have them.
GPU_LOOPS = """\
HloModule jit_step, is_scheduled=true

%inner_body (p: (s32[], f32[8,16])) -> (s32[], f32[8,16]) {
  %p = (s32[], f32[8,16]{1,0}) parameter(0)
  %x = f32[8,16]{1,0} get-tuple-element(%p), index=1
  %w = f32[16,16]{1,0} constant({...})
  %dot.1 = f32[8,16]{1,0} dot(%x, %w), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  %i = s32[] get-tuple-element(%p), index=0
  ROOT %t = (s32[], f32[8,16]{1,0}) tuple(%i, %dot.1)
}

%condition (p.1: (s32[], f32[8,16])) -> pred[] {
  %p.1 = (s32[], f32[8,16]{1,0}) parameter(0)
  ROOT %true = pred[] constant(true)
}

%outer_body (p.2: (s32[], f32[8,16])) -> (s32[], f32[8,16]) {
  %p.2 = (s32[], f32[8,16]{1,0}) parameter(0)
  ROOT %while.1 = (s32[], f32[8,16]{1,0}) while(%p.2), condition=%condition, body=%inner_body, \
backend_config={"known_trip_count":{"n":"3"}}
}

ENTRY %main (p.3: (s32[], f32[8,16])) -> (s32[], f32[8,16]) {
  %p.3 = (s32[], f32[8,16]{1,0}) parameter(0)
  ROOT %while.2 = (s32[], f32[8,16]{1,0}) while(%p.3), condition=%condition, body=%outer_body, \
backend_config={"known_trip_count":{"n":"5"}}
}
"""

# A TPU's loop: no annotation, the counter goes up by 2 in a fusion, the bound stands in the condition.
TPU_LOOP = """\
HloModule jit_step, is_scheduled=true

%next (i: s32[]) -> s32[] {
  %i = s32[]{:T(128)} parameter(0)
  %two = s32[]{:T(128)} constant(2)
  ROOT %add.9 = s32[]{:T(128)} add(%i, %two)
}

%body (p: (s32[], f32[8,16])) -> (s32[], f32[8,16]) {
  %p = (s32[]{:T(128)}, f32[8,16]{1,0:T(8,128)S(1)}) parameter(0)
  %i.1 = s32[]{:T(128)} get-tuple-element(%p), index=0
  %x = f32[8,16]{1,0:T(8,128)S(1)} get-tuple-element(%p), index=1
  %w = f32[16,16]{1,0:T(8,128)} constant({...})
  %convolution.1 = f32[8,16]{1,0:T(8,128)S(1)} convolution(%x, %w), dim_labels=bf_io->bf
  %fusion.1 = s32[]{:T(128)} fusion(%i.1), kind=kLoop, calls=%next
  ROOT %t = (s32[]{:T(128)}, f32[8,16]{1,0:T(8,128)S(1)}) tuple(%fusion.1, %convolution.1)
}

%condition (p.1: (s32[], f32[8,16])) -> pred[] {
  %p.1 = (s32[]{:T(128)}, f32[8,16]{1,0:T(8,128)S(1)}) parameter(0)
  %i.2 = s32[]{:T(128)} get-tuple-element(%p.1), index=0
  %bound = s32[]{:T(128)} constant(9)
  ROOT %lt = pred[]{:T(512)} compare(%i.2, %bound), direction=LT
}

ENTRY %main (x.1: f32[8,16]) -> f32[8,16] {
  %x.1 = f32[8,16]{1,0:T(8,128)} parameter(0)
  %zero = s32[]{:T(128)} constant(0)
  %copy.1 = s32[]{:T(128)} copy(%zero)
  %tuple.1 = (s32[]{:T(128)}, f32[8,16]{1,0:T(8,128)S(1)}) tuple(%copy.1, %x.1)
  %while.1 = (s32[]{:T(128)}, f32[8,16]{1,0:T(8,128)S(1)}) while(%tuple.1), condition=%condition, body=%body
  ROOT %y = f32[8,16]{1,0:T(8,128)} get-tuple-element(%while.1), index=1
}
"""

# A gather that a TPU carries through a matrix product: three fusions, one transfer.
TPU_CHAIN = """\
HloModule jit_step, is_scheduled=true

%start (p: bf16[1,256,64]) -> bf16[1,2048,64] {
  %p = bf16[1,256,64]{2,1,0} parameter(0)
  ROOT %all-gather.1 = bf16[1,2048,64]{2,1,0} all-gather(%p), channel_id=4, \
replica_groups=mesh['axis_0'=1,'axis_1'=8] {'axis_1'}, dimensions={1}, frontend_attributes={chain_id="0"}
}

%carried (p.1: bf16[1,256,64], x: bf16[8,16], w: bf16[16,4]) -> bf16[8,4] {
  %p.1 = bf16[1,256,64]{2,1,0} parameter(0)
  %x = bf16[8,16]{1,0} parameter(1)
  %w = bf16[16,4]{1,0} parameter(2)
  %all-gather.2 = bf16[1,2048,64]{2,1,0} all-gather(%p.1), channel_id=4, \
replica_groups=mesh['axis_0'=1,'axis_1'=8] {'axis_1'}, dimensions={1}, frontend_attributes={chain_id="0"}
  ROOT %convolution.1 = bf16[8,4]{1,0} convolution(%x, %w), dim_labels=bf_io->bf
}

%end (p.2: bf16[1,256,64]) -> bf16[1,2048,64] {
  %p.2 = bf16[1,256,64]{2,1,0} parameter(0)
  ROOT %all-gather.3 = bf16[1,2048,64]{2,1,0} all-gather(%p.2), channel_id=4, \
replica_groups=mesh['axis_0'=1,'axis_1'=8] {'axis_1'}, dimensions={1}, frontend_attributes={chain_id="0"}
}

%all-reduce-scatter.7 (p.3: f32[16,8]) -> f32[2,8] {
  %p.3 = f32[16,8]{1,0} parameter(0)
  %all-reduce.1 = f32[16,8]{1,0} all-reduce(%p.3), channel_id=5, replica_groups={{0,1,2,3,4,5,6,7}}, to_apply=%sum
  ROOT %dynamic-slice.1 = f32[2,8]{1,0} dynamic-slice(%all-reduce.1), dynamic_slice_sizes={2,8}
}

ENTRY %main (p.4: bf16[1,256,64], x.1: bf16[8,16], w.1: bf16[16,4], g: f32[16,8]) -> f32[2,8] {
  %p.4 = bf16[1,256,64]{2,1,0} parameter(0)
  %x.1 = bf16[8,16]{1,0} parameter(1)
  %w.1 = bf16[16,4]{1,0} parameter(2)
  %g = f32[16,8]{1,0} parameter(3)
  %fusion.1 = bf16[1,2048,64]{2,1,0} fusion(%p.4), kind=kCustom, calls=%start
  %fusion.2 = bf16[8,4]{1,0} fusion(%p.4, %x.1, %w.1), kind=kCustom, calls=%carried
  %fusion.3 = bf16[1,2048,64]{2,1,0} fusion(%p.4), kind=kCustom, calls=%end
  ROOT %fusion.4 = f32[2,8]{1,0} fusion(%g), kind=kCustom, calls=%all-reduce-scatter.7
}
"""

SOURCES = """

FileNames
1 "/somewhere/meshtrain/meshtrain/sharding/placement.py"
2 "/somewhere/meshtrain/meshtrain/models/layers.py"
3 "/usr/lib/python3/site-packages/flax/linen/module.py"

FunctionNames
1 "Placement._hold"
2 "weight"
3 "Mlp.__call__"
4 "wrapped"

FileLocations
1 {file_name_id=1 function_name_id=1 line=89 end_line=89 column=1 end_column=2}
2 {file_name_id=2 function_name_id=2 line=34 end_line=34 column=1 end_column=2}
3 {file_name_id=2 function_name_id=3 line=83 end_line=83 column=1 end_column=2}
4 {file_name_id=3 function_name_id=4 line=7 end_line=7 column=1 end_column=2}

StackFrames
1 {file_location_id=3 parent_frame_id=1}
2 {file_location_id=4 parent_frame_id=2}
3 {file_location_id=2 parent_frame_id=3}
4 {file_location_id=1 parent_frame_id=4}
"""
