"""What else fits? Two complete examples: numbers to words by an encoder-decoder, digits by a convnet.

Each has a task, with its modules and options, and sources of data; images are also read from IDX files. Preferences
between answers are a third one, whose task is a decoder with another loss. The names of
`SEAMS` are all that the core knows of this side room.
"""
