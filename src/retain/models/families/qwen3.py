"""Qwen 3: Qwen 2 without the biases, with norms of the heads of q and k (arXiv 2505.09388)."""

from retain.models.families.qwen2 import build, spec_from_config

__all__ = ["build", "spec_from_config"]
