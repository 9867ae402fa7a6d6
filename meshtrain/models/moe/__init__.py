"""Mixture of experts: the router, rows in the order of experts, and products with each row's own expert."""
