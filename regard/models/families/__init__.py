"""One short file per family: what is peculiar to it, and how its weights are called."""
