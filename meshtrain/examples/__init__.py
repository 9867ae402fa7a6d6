"""Three complete examples: an encoder-decoder spells numbers, a convnet reads digits, and preferences (DPO).

Each example has a task, with its modules and options, and data sources. Images are also read from IDX files; DPO is a
decoder with another loss. This is an optional package: the core knows only the names in `EXTENSION_POINTS`.
"""
