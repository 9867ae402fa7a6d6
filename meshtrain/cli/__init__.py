"""Command lines, configuration files and tables as text, without JAX."""
