"""Exact weights and measures of them, in one pass, in torch and Triton."""
