"""A session of the explorer: what the terminal and the page both show."""
