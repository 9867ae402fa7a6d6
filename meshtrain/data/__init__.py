"""Training data: documents, tokens, packed examples, and global batches that are the same on every mesh.

`data.source` names a data source. Opening a source returns numbered training and validation examples, and a
fingerprint. Tokenizers and chat templates convert text to ids; packing converts ids to rows. The state of the loader is
one integer: the index of a sample determines its example, on any mesh and with any number of processes.
"""
