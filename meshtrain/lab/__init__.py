"""Experimental data parallelism: compressed gradients, gradients one step late, local steps (DiLoCo).

Compression sends int8 with shared scales, or the largest elements of each block, with error feedback. Gradients one
step late overlap their complete reduction with the next step. Local steps synchronize replicas only every few steps,
with an outer optimizer (DiLoCo).
The core refers to this optional package only by the names in `EXTENSION_POINTS`.
"""
