"""Three example tasks with data: an encoder-decoder spells numbers, a convnet classifies digits, DPO trains a decoder.

Each example consists of a task and one or more data sources. Direct preference optimization (DPO) trains the decoder of
the core with another loss. This is an optional package: the core does not import it, and only lists the names of its
functions in `EXTENSION_POINTS`.
"""
