"""WHAT is computed? A task is an init and a loss; the built-in ones are Linen modules with named dims."""
