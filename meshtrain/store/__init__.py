"""Object stores (GCS buckets): paths, listing, writing, and one-line errors.

Checkpoints are written to buckets, and text is read from them.
"""
