"""WHAT GOES IN: documents, tokens, packed examples, and batches that know neither mesh nor process count."""
