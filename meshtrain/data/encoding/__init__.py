"""Which text do ids stand for? Special tokens in texts, and the bytes of each id."""
