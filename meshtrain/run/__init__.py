"""A training run: its workdir, initial state, saves, evaluations, summary and resumption.

This package creates, locks and reads the workdir. A run starts from its newest checkpoint, from the weights of
`init_from`, or from initial weights. Commands that do not train, such as `evaluate`, also use this package to load a
run's weights onto any mesh.
"""
