"""Is the cluster healthy? Times and results of collectives on each axis, and checks before a job.

The doctor judges facts of each machine alone, then of all processes together, then collectives; each check is a
function of facts. Measured collectives are fitted to links, which the planner can read. This is a
side room: the core runs without its folder.
"""
