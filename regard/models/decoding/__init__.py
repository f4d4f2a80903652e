"""One token at a time on a GPU: the step of a decoder as few kernels, captured once and replayed."""
