"""WHAT WOULD HAPPEN elsewhere? The train step, compiled for a cluster that need not exist, and its program read."""
