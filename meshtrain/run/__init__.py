"""A RUN'S FOLDER AND LIFE: its files, its starting state, its saves, its evaluations and its summary."""
