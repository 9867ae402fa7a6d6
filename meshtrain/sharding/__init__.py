"""Placement of arrays: the axes of the mesh, the table of rules, and the resulting shardings.

An axis of the mesh is one record with its roles; the mesh orders devices so that inner axes get fast links. Rules state
which mesh axes split which logical axis, separately for weights and activations. Shapes, rules and the ZeRO level
determine the sharding of each stored array, or the error if it cannot be split. Logical axes also determine which
weights decay and which are matrices. Models access the mesh only through `Placement`. The manual region over data, in
which gradients are summed and reduced, is in this package too.
"""
