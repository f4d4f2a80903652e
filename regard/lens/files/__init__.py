"""Capture files: written, read and checked."""
