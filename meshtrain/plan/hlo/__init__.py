"""Reads a compiled program: instructions, shapes, collectives, FLOPs and bytes. Uses no JAX."""
