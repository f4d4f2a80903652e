"""Edits of a model's attention as values; `regard.edit` applies them, `regard.effect` measures what they do."""

from regard.edits.values import Edit, Edits, ablate, add, knock_out, patch, zero_values

__all__ = ["Edit", "Edits", "ablate", "add", "knock_out", "patch", "zero_values"]
