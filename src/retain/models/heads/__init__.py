"""Draft heads: small models that read hidden states of a target, and draft its next tokens.

Each is one file, named like its Hugging Face `model_type`, with `build(weights, target) -> DraftHead`. A head's program
takes one token of each request with the hidden state before it. It gives logits and the hidden state for the next
token.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import ModuleType

from torch import Tensor

from retain.files import quote
from retain.kernels.ops import Operation
from retain.models.decoder import ModelSpec
from retain.models.layers import Embedding
from retain.plugins import plugin_names

Restrict = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class HeadTarget:
    """What a head shares with its target: sizes and caches, token embeddings, and factors of cached keys."""

    spec: ModelSpec
    embedding: Embedding
    key_factors: Mapping[int, Tensor]  # by cache, float32 [G, D]: see passes/balance.py


@dataclass(frozen=True)
class DraftHead:
    """The operations of a head, and what its logits [N, V] become by the numbers behind its hidden states [N, n]."""

    operations: Iterator[Operation]
    hidden_size: int
    restrict: Restrict | None = None


def load_head(model_type: str) -> ModuleType:
    """Import the module of a head, which has `build`. Raises ValueError for a model that is none."""
    names = plugin_names(__name__)
    if model_type not in names:
        raise ValueError(f"model type {quote(model_type)} is no draft head: one of {', '.join(names)}")
    return importlib.import_module(f"{__name__}.{model_type}")
