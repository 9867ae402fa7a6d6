"""Reports: one page about several runs, with curves, differences, memory, mesh, schedule and samples.

Runs are read from the files in their folders; runs on equal meshes share a picture of the mesh. Curves are thinned
without losing spikes. This is an optional package: the core runs without its folder.
"""
