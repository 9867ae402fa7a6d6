"""The doctor's checks: of one machine, of all processes, of the job itself."""
