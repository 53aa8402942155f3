"""Mistral: Llama whose layers see a window (arXiv 2310.06825)."""

from retain.models.families.llama import build, spec

__all__ = ["build", "spec"]
