"""Costs of a step by arithmetic: lower bounds of the bytes sent, and the memory of one device."""
