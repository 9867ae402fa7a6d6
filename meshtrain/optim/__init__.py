"""HOW do weights move? Learning rates, decay masks, optimizers."""
