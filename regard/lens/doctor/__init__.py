"""The mask doctor: what was wrong with the masks and numbers of a run."""
