"""How do weights move? Learning rates, optimizers, and which weights are trained or decay.

An optimizer is a direction by name, decoupled weight decay and the learning rate, on optax. Masks say from logical
axes which weights decay and which are matrices. Each array of an optimizer's state is placed as its weight; moments
may be stored in fewer bytes.
"""
