"""WHAT IS SAVED? Checkpoints: the whole training state of a run, restored onto any mesh."""
