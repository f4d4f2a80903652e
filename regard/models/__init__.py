"""Models: loading, saving, families, and the model classes."""
