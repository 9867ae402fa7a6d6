"""Special tokens in texts, and the bytes of text that each token id represents."""
