"""Tokenizers and images: what users have, as tensors."""
