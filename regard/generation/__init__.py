"""Text generation: options, sampling, beam search, the loop, and the captured CUDA step."""
