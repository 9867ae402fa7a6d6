"""Checkpoints: the complete training state of a run, with checksums, restored onto any mesh.

Orbax writes in the background. A manifest of checksums is written last; a checkpoint without a manifest is incomplete.
The newest, every Nth and the best checkpoints are retained. Weights of another run are restored onto this run's
shardings.
"""
