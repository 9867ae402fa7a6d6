"""WHAT IS KEPT? Checkpoints: the whole state of a run, read back onto any mesh."""
