"""What models do for users: fill-mask, classification, question answering, captions, embeddings."""
