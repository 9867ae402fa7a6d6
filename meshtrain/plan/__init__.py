"""WHAT WOULD HAPPEN elsewhere? The real step, compiled for a cluster that is not there, and what its program says."""
