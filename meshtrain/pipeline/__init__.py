"""In what order do stages run? Schedules as tables, their proof and charts, and the executor that runs them.

A schedule is plain data, made and proven without JAX. A program assigns buffers to its rows and merges rows into
loops; the executor runs it as one SPMD program. Layers are cut into a forward pass with residuals and a backward pass
from them. Evaluation and generation run forward only. Checkpoints keep layers in order, whatever the chunks.
"""
