"""Edits of attention, what they do, and statistics of heads over a corpus."""
