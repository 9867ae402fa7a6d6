"""WHAT does a user say? Command lines, typed options, paths, configuration files, errors and tables. No JAX."""
