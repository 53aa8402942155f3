"""The KV cache: which slots a request owns, what they keep, and where evicted prefixes go.

`manager.py` is the facade that the engine sees. `memory/` has pages and slots, `eviction/` the policies, `prefix/` the
radix tree, `stores/` the tiers below the pool, `stats/` the statistics.

Pages are allocated and freed in arrays, never one by one, and the accountant of the pool must balance after every
step. A policy is one file, found by its name. Does not depend on: text, sampling, the arithmetic of layers.
"""
