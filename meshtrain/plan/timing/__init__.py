"""Models the time of a step: a simulation with two streams, the speed of products, calibration by a measured run."""
