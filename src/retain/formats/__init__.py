"""Model file formats: safetensors folders, GGUF files and random weights, each under Hugging Face's names.

Does not depend on: what a model computes, requests, the cache.
"""
