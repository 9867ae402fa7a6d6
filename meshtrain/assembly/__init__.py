"""Assembles a run: the task on its mesh, the functions of a step, and their compiler options. Allocates no arrays."""
