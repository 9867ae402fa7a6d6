"""The axes of the mesh, and nothing else."""

# Slowest network first: a mesh is filled row by row, so the last axes are neighbours on the fast links inside a host.
# tensor talks within every layer, fsdp once a layer, pipeline once a microbatch, data once a step.
AXES = ("data", "pipeline", "fsdp", "tensor")
