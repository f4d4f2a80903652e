"""The certificate that a model computes what transformers computes."""
