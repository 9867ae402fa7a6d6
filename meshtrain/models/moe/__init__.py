"""Mixture of experts: the router, rows sorted by expert, and products of each row with its expert's weights."""
