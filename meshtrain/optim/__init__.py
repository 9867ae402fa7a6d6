"""Updates of the weights: learning rates, optimizers, averages of weights, and how moments are stored.

An optimizer is a direction by name, decoupled weight decay and the learning rate, on optax. Each array of its state is
sharded like its weight; moments may be stored in fewer bytes.
"""
