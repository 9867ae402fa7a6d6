"""The target cluster, which need not exist: its devices, and the step traced and compiled for it."""
