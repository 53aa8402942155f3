"""Offloading: spans of pages in tiers below the pool.

`manager.py` (Offloader) moves pages into stores and finds them there. `loader.py` brings them back, layer by layer.
`tiers/` has the stores, `selective/` loads only important tokens. Does not depend on: prefixes, policies, requests.
"""
