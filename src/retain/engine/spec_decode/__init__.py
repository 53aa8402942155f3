"""Speculative decoding: drafting, verification, and the choice of draft lengths. Does not depend on: the cache."""
