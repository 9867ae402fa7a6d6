"""What does a user type and read? Command lines, configuration files and tables as text. No JAX."""
