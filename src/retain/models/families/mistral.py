"""Mistral: Llama with a sliding window in every layer (arXiv 2310.06825)."""

from retain.models.families.llama import build, spec_from_config

__all__ = ["build", "spec_from_config"]
