"""Who starts the processes? Platform, devices, the compilation cache, and how processes connect.

JAX is initialised in one place here, after the processes have met. Tables hold the published peaks of accelerators
and measured links. Once a run steps, signals ask for a save, a watchdog ends what hangs, and peers exchange small
messages.
"""
