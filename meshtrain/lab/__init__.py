"""Experimental data parallelism: compressed gradients, gradients one step late, local steps (DiLoCo).

Compression sends int8 with shared scales or the largest elements of each block, with error feedback. One step late
hides a whole reduction behind the next step. Local steps join groups by an outer optimizer (DiLoCo). The names of
`EXTENSION_POINTS` are all that the core knows of this optional package.
"""
