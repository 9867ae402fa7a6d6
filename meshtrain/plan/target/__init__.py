"""The cluster that is not there: its devices, and the step traced and compiled for it."""
