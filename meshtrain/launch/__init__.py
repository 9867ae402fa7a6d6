"""WHO STARTS the processes? Platform, devices, the compilation cache, and the connection of several processes."""
