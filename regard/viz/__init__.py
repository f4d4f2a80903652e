"""Figures: matplotlib and HTML figures of weights, masks and steps."""
