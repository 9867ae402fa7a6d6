"""The training step: microbatches, gradients, clipping, the guard and the update in one jitted function.

Read `step` first, then `accumulate`, which sums gradients over microbatches. `precision` and `loss_scale` choose the
dtypes. `state` defines all arrays that a step reads and writes; `shardings` and `device_memory` compute their shapes,
shardings and bytes before any array is allocated.
"""
