"""Mixture of experts: the router, sorting of tokens by expert, and products of tokens with their experts' weights."""
