"""Parity certificates: a checkpoint in regard compared with the same checkpoint in transformers."""
