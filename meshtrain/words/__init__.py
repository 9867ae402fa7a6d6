"""WHAT does a user say? Command lines, typed options, paths and configuration files, and the answers. No JAX."""
