"""Tasks: fill-mask, classification, question answering, captions, embeddings."""
