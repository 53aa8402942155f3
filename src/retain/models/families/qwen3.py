"""Qwen 3: Qwen 2 without biases, with norms of the q and k heads (arXiv 2505.09388)."""

from retain.models.families.qwen2 import build, spec_from_config

__all__ = ["build", "spec_from_config"]
