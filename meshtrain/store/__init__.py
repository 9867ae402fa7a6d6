"""Which files are in a bucket? Object stores (GCS): paths, listing, writing, and one-line errors.

Checkpoints are written to buckets, and text is read from them.
"""
