"""Cluster checks: times and results of collectives on each axis, and checks before a job.

The doctor first checks each machine separately, then all processes together, then collectives; each check is a pure
function of facts. The benchmark fits latency and bandwidth to the times of collectives; the planner can read the fitted
values. This is an optional package: the core runs without its folder.
"""
