"""Computes costs of a step by formulas: lower bounds of the bytes sent, and the memory of one device."""
