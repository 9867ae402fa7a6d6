"""WHAT ELSE FITS? Two complete examples: numbers to words by an encoder-decoder, images of digits by a convnet.

A side room: it imports the core, which knows it by the names of `config/side_rooms.py` alone.
"""
