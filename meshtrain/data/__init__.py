"""WHAT GOES IN: documents, tokens, packed examples, and global batches that depend on neither mesh nor processes."""
