"""Text to ids and back, from new and old file sets."""
