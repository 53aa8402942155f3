"""Prefix caching: a radix tree of pages that requests share. Does not depend on: scheduling."""
