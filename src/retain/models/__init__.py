"""Models: from token ids to logits.

Each family is one file in families/, named like its Hugging Face `model_type`.
Does not depend on: requests, the cache, sampling, text.
"""

from __future__ import annotations

import importlib
from types import ModuleType

import torch
from torch import Tensor

from retain.files import quote, shorten
from retain.kernels.api import Program
from retain.models.decoder import Decoder
from retain.models.weights import Weights
from retain.plugins import plugin_names

SHAPE_ERRORS = (ArithmeticError, AttributeError, IndexError, RuntimeError, TypeError)  # raised by sizes that disagree


def list_families() -> list[str]:
    """Return the names of all families, sorted."""
    return plugin_names(f"{__name__}.families")


def load_family(model_type: str) -> ModuleType:
    """Import a family's module, which has `spec_from_config` and `build`. Raises ValueError for an unknown family."""
    if model_type not in list_families():
        raise ValueError(f"model type {quote(model_type)} is not supported: one of {', '.join(list_families())}")
    return importlib.import_module(f"{__name__}.families.{model_type}")


def build(weights: Weights, program: Program | None = None) -> Decoder:
    """Build the decoder of a checkpoint, and emit it into `program` if one is given.

    A program checks every shape. Without one, a forward pass over two tokens checks them (see check_shapes).
    Raises ValueError when the config lacks a key, asks for a feature that the family does not compute, or does not
    match the tensors.
    """
    try:
        decoder = load_family(weights.config["model_type"]).build(weights)
        decoder.emit(program) if program else check_shapes(decoder)
    except KeyError as e:
        raise ValueError(f"config.json lacks {shorten(e)}") from e
    except SHAPE_ERRORS as e:
        raise ValueError(f"the tensors of the model do not fit its config: {shorten(e)}") from e
    return decoder


@torch.no_grad()
def check_shapes(decoder: Decoder) -> None:
    """Run the first and the last token at the first and the last position. Raises one of SHAPE_ERRORS."""
    s = decoder.spec
    ids, pos = torch.tensor([0, s.vocab_size - 1]), torch.tensor([0, s.max_position_embeddings - 1])

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if (q.shape[1:], k.shape[1:], v.shape[1:]) != ((s.num_heads, s.head_dim), *[(s.num_kv_heads, s.head_dim)] * 2):
            raise RuntimeError(f"layer {layer} has heads q {q.shape[1:]}, k {k.shape[1:]}, v {v.shape[1:]}")
        return q

    logits = decoder.compute_logits(decoder.forward(ids, pos, attend))
    if logits.shape[1] != s.vocab_size:
        raise RuntimeError(f"{logits.shape[1]} logits for a vocabulary of {s.vocab_size}")
