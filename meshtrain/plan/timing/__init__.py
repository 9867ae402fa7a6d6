"""How long a step takes, modelled: two streams, the efficiency of products, calibration by a measured run."""
