"""Experimental data parallelism: compressed gradients, gradients one step late, local steps (DiLoCo).

Compression sends int8 blocks with one scale each, or the largest elements of each block, with error feedback. With
gradients one step late, the complete reduction overlaps with the next step. Local steps synchronize replicas only every
few steps, with an outer optimizer (DiLoCo). The core refers to this optional package only by the names in
`EXTENSION_POINTS`.
"""
