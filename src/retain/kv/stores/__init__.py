"""Stores: spans of pages and checkpoints below the pool.

`offloader.py` moves pages into stores and finds them there; `loader.py` brings them back, layer by layer. `tiers/` has
the stores by the names of the option, `selective/` loads only important tokens. Does not depend on: prefixes, policies.
"""
