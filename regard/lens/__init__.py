"""The lens: what attention weights say, and whether they are weights at all."""
