"""The lens: attention weights of any PyTorch model, measured, compared and stored."""
