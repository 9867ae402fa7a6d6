"""Reports: pages about runs, plans and searches, and the scaling of a configuration over numbers of devices.

Runs are read from the files in their folders. Curves are thinned without losing spikes, and runs on equal meshes share
a picture of the mesh. The package also implements `plan --html` and `plan --scaling`. It is an optional package: the
core runs without its folder.
"""
