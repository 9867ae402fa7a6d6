"""Assembly of a run: the task on its mesh, the functions of a step, and how they are compiled. No arrays."""
