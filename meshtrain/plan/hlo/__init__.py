"""A compiled program, read: instructions, shapes, collectives, FLOPs and bytes. No JAX."""
