"""Where is it kept? Buckets of objects, `gs://bucket/prefix`, beside the folders of a disk.

Checkpoints are written there and text is read from there. Whatever a bucket refuses is one line for the user.
"""
