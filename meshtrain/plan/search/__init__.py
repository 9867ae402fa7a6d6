"""Which way is best? Candidates, their estimates, the ranking, and changes that make a step fit."""
