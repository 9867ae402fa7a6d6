"""What else can be trained? Three examples: an encoder-decoder spells numbers, a convnet reads digits, DPO.

Each has a task, with its modules and options, and sources of data; images are also read from IDX files, and the task of
preferences is a decoder with another loss. The names of `SEAMS` are all that the core knows of this side room.
"""
