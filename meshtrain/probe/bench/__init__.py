"""Benchmark of collectives: operations, a sweep over sizes and axes, and a fitted model of each link."""
