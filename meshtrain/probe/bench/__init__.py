"""Benchmark of collectives: operations, a sweep over sizes and axes, and a fitted latency and bandwidth per link."""
