"""What masks and heads do: counted, named, and judged."""
