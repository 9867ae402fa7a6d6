"""WHAT is computed? A task is an init and a loss; the built-in one is Linen modules with logical axes."""
