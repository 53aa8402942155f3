"""Matrices of a model: dense, quantized, or as a file stores them."""
