"""Comparison of parallelisms: the same weights and batches on one device and on meshes, compared array by array."""
