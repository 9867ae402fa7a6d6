"""The decoder-only transformer: its layers, its KV cache, its cost, and the task that trains it."""
