"""Placement of arrays: the axes of the mesh, the table of rules, and the resulting shardings.

An axis is one record with its roles; the mesh orders devices so that inner axes get fast links. Rules say which mesh
axes split which logical axis, once for weights and once for activations. From shapes, rules and the ZeRO level follow
where a stored array lives, and why it cannot live there. Logical axes also tell which weights decay and which are
matrices. `Placement` is all that models see of the mesh. The manual region over data, in which gradients are summed and
reduced, is here too.
"""
