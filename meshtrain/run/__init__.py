"""A RUN'S FOLDER AND LIFE: where it lies, where it starts from, what it saves, how it is evaluated and summed up."""
