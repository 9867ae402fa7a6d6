"""Reports: pages about runs, plans and searches, and the scaling of a configuration over numbers of devices.

Runs are read from the files in their folders; runs on equal meshes share a picture of the mesh. Curves are thinned
without losing spikes. `plan --html` and `plan --scaling` are here. This is an optional package: the core runs without
its folder.
"""
