"""File formats of model weights. Does not depend on: what a model computes."""
