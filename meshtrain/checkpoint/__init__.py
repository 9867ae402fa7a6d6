"""Checkpoints: the complete training state of a run, with checksums, restored onto any mesh.

Orbax writes in the background. A manifest of checksums is written last, and a checkpoint without one is incomplete.
The newest, every Nth and the best are kept. Weights of another run are restored onto this run's shardings.
"""
