"""WHAT ELSE CAN BE TRIED over data? Compressed gradients, gradients one step late, groups that train apart.

A side room: it imports the core, and the core names it only in `config/side_rooms.py`.

compression     int8 with shared scales, and the largest elements of each block, with error feedback
one_step_late   gradients that are applied by the next step, so that their reduction is hidden
local_steps     groups that train apart for some steps, and the outer optimizer that joins them (DiLoCo)
"""
