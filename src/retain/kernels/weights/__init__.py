"""Matrices of a model: dense, quantized, as a file stores them, or stacked."""
