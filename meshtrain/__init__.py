"""Trains transformers on any mesh of accelerators, and knows before a run what it needs."""

__version__ = "0.1.0"
