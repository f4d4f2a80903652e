"""Exact weights, measures of them, and the pass that makes them: in torch, and in Triton on CUDA."""
