"""Tables of a row for each token: the embedding, the head and its losses."""
