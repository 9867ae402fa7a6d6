"""Which files are in a bucket? Object stores (GCS): paths, listing, writing, and one-line errors.

Checkpoints are written there, and text is read from there.
"""
