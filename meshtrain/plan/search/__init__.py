"""Searches for the fastest configuration: candidates, estimates, ranking, and changes that make a step fit."""
