"""The decoder: its layers and cache, and the task built from them."""
