"""JSON schemas as grammars: what a schema means, where it is refused, and numbers that need rules of their own."""
