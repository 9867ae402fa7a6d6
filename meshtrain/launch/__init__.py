"""WHO STARTS the processes? Platform, devices, the compilation cache, and the meeting of several processes."""
