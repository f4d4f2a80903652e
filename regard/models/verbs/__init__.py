"""What a model does with text: embed, fill, classify, tag, answer, generate."""
