"""HOW do weights move? Learning rates, optimizers, and which weights are trained or decay."""
