"""How do runs compare? One page made from their folders: curves, differences, memory, mesh, schedule, samples.

Runs are read from what their folders hold; those on one mesh are shown together. Curves are thinned so that spikes
stay. This is a side room: the core runs without its folder.
"""
