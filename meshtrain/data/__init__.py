"""What goes in? Documents, tokens, packed examples, and global batches that are the same on every mesh.

Options name a source. It becomes examples by number, train and validation, with a fingerprint. Tokenizers and chat
templates turn text into ids, packing turns ids into rows. The loader's whole state is one integer: the index of a
sample says which example it is, on any mesh and number of processes.
"""
