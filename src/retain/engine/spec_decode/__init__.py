"""Speculative decoding: drafts, their verification, and how many are worth their time. Does not depend on: the cache."""
