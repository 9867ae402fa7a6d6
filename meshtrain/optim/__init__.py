"""Updates of the weights: learning rates, optimizers, and masks of trained and decaying weights.

An optimizer is a direction by name, decoupled weight decay and the learning rate, on optax. Masks derive from logical
axes which weights decay and which are matrices. Each array of an optimizer's state is sharded like its weight; moments
may be stored in fewer bytes.
"""
