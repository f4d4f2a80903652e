"""Taps that catch the attention calls of a watched model."""
