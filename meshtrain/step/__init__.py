"""The training step: microbatches, gradients, clipping, the guard and the update in one jitted function.

The step itself comes first; then the sums over microbatches, and the last one, in which layers are reduced as they
finish. Precision and the loss scale say in which dtypes. The training state is all that a step reads and writes; its
shapes, shardings and bytes are known before any array is.
"""
