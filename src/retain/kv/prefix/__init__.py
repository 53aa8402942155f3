"""Prefix caching: a radix tree of texts, whose pages and checkpoints requests share. Does not depend on: scheduling."""
