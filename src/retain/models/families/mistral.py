"""Mistral: Llama whose layers see a window (arXiv 2310.06825)."""

from retain.models.families.llama import build, spec_from_config

__all__ = ["build", "spec_from_config"]
