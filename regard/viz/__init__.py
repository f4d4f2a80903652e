"""Figures: matplotlib and HTML pictures of weights, masks and steps."""
