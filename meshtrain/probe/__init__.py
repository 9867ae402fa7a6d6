"""IS THE CLUSTER WELL? The time and the value of collectives on each axis of the mesh, and checks before a job."""
