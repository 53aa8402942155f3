"""Eviction: policies that score slots, and rows that carry them out. Does not depend on: prefixes, scheduling."""
