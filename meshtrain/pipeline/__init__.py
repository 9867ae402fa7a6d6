"""Pipeline parallelism: schedules as tables, their proof and charts, and the executor that runs them.

A schedule is plain data, built and proven without JAX. A program assigns buffers to the schedule's rows (clock ticks)
and merges rows into loops; the executor runs the program as one SPMD program. Layers are split into a forward pass that
returns residuals and a backward pass that starts from these residuals.
"""
