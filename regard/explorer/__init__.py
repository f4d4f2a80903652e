"""The explorer: one look at a text or a capture, for the terminal, the notebook, the web page and the exported page."""
