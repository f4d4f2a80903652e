"""Models on the one operation: a short file per family, and the parts they share."""
