"""The doctor's checks: of each machine, of all processes together, and of the job itself."""
