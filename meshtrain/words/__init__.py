"""What does a user say? Command lines, typed options, paths, files and errors, without JAX.

Errors and exit codes stand here: a user's mistake is one line for each problem. An option is a field of a frozen
dataclass with one line of text. Flags are converted to the types of the fields; names of functions are imported.
"""
