"""Training data: documents, tokens, packed examples, and global batches that are the same on every mesh.

`data.source` names a source. A source is opened as numbered examples, for training and validation, and a fingerprint.
Tokenizers and chat templates turn text into ids; packing turns ids into rows. The state of the loader is one integer:
the index of a sample determines its example, on any mesh and with any number of processes.
"""
