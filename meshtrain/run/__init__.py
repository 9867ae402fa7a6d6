"""A run: its folder, start, saves, evaluations, summary, and how it resumes.

The folder is made, locked and read back here. A run starts from its newest checkpoint, from weights made elsewhere,
or from initial ones. Commands that only compute with a run's weights load them here, onto any mesh.
"""
