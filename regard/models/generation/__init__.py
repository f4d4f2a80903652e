"""Generation: from logits to tokens and text, for any model that can begin, step and keep rows."""
