"""What is not on a disk? Buckets: their objects as places, listings and writes, and one line where one refuses.

Checkpoints are written there, and text is read from there.
"""
