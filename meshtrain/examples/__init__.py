"""Three example tasks with data: an encoder-decoder spells numbers, a convnet classifies digits, DPO trains a decoder.

Each example has a task, with its modules and options, and data sources. Images are also read from IDX files. Direct
preference optimization (DPO) trains the decoder with another loss. This is an optional package: the core knows only the
names in `EXTENSION_POINTS`.
"""
