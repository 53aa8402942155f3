"""Spans as objects of an object store that many engines share: format, client, index and reader.

Does not depend on: the layout of K and V, texts, requests.
"""
