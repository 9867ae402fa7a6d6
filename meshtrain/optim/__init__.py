"""How do weights move? Learning rates, optimizers, and how their moments are stored.

An optimizer is a direction by name, decoupled weight decay and the learning rate, on optax. Each array of its state is
placed as its weight; moments may be stored in fewer bytes.
"""
