"""What else fits? Three complete examples: numbers to words by an encoder-decoder, digits by a convnet, preferences.

Each has a task, with its modules and options, and sources of data; images are also read from IDX files, and the task of
preferences is a decoder with another loss. The names of `SEAMS` are all that the core knows of this side room.
"""
