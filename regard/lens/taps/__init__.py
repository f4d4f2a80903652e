"""Catching the attention calls of somebody else's model: what is installed, what is reported, by whom."""
