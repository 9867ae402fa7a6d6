"""WHAT HAPPENS in one step? Microbatches, gradients, clipping, the update: one jitted function."""
