"""Figures, and what they are drawn with."""
