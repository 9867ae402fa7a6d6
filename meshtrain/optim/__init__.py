"""Updates of the weights: learning rates, optimizers, averages of weights, and how moments are stored.

An optimizer is built with optax from a direction (such as Adam's), decoupled weight decay and the learning rate. Each
array of its state is sharded like its weight; moments may be stored in fewer bytes.
"""
