"""Captures as files: written, read, compared."""
