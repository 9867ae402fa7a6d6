"""Start of processes: platform, devices, the compilation cache, and the connections between processes.

JAX is initialized only in `distributed`, after the processes have registered with each other. During training, signals
cause a save, a watchdog ends hanging processes, and peers exchange small messages.
"""
