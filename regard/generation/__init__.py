"""Text generation: options, the loop with its sampling, beam search, streaming, and the captured CUDA step."""
