"""Tokenizers, images, and rows of text files."""
