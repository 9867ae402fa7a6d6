"""Who starts the processes? Platform, devices, the compilation cache, and how processes connect.

JAX is initialised in one place here, after the processes have met. Once a run steps, signals ask for a save, a watchdog
ends what hangs, and peers exchange small messages.
"""
