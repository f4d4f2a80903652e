"""The lens: what attention weights say, for any PyTorch model."""
