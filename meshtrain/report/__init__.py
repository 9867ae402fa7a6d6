"""How do runs compare? One page made from their folders: curves, differences, memory, mesh, schedule, samples.

Runs are read from the files in their folders; runs on equal meshes share a picture of the mesh. Curves are thinned
without losing spikes. This is an optional package: the core runs without its folder.
"""
