"""Collectives, timed: operations, a sweep over sizes and axes, and the link that fits the times."""
