"""The decoder: its layers and cache, and the task that is made of them."""
