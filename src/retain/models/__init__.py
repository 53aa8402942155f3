"""Models: from token ids to logits.

Each family is one file in families/, named like its Hugging Face `model_type`.
Does not depend on: requests, the cache, sampling, text.
"""

from __future__ import annotations

import importlib
import logging
import re
from types import ModuleType

import torch
from torch import Tensor

from retain.files import quote, shorten
from retain.kernels.api import Program
from retain.kernels.attention_params import AttentionParams
from retain.models.decoder import Decoder
from retain.models.family_config import check_supported
from retain.models.weights import Weights
from retain.plugins import plugin_names

logger = logging.getLogger(__name__)
VALUE_ERRORS = (ArithmeticError, AttributeError, TypeError)  # raised by a value of the config of another type
SHAPE_ERRORS = (IndexError, RuntimeError)  # raised by tensors whose sizes disagree
IGNORED_TENSORS = (r"rotary_emb\.inv_freq",)  # written by old versions of transformers; each family may have more


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
    match the tensors, and for a tensor that the family does not use.
    """
    family = load_family(weights.config["model_type"])
    check_supported(weights.config, per_layer_config=None)  # of transformers, in every family
    try:
        decoder: Decoder = family.build(weights)
        decoder.emit(program) if program else check_shapes(decoder)
    except torch.OutOfMemoryError as e:
        raise ValueError(f"the model does not fit the memory of the device: {shorten(e)}") from e
    except VALUE_ERRORS as e:
        raise ValueError(f"config.json has a value that cannot be used: {shorten(e)}") from e
    except SHAPE_ERRORS as e:
        raise ValueError(f"the tensors of the model do not fit its config: {shorten(e)}") from e
    check_all_tensors_used(weights, getattr(family, "IGNORED_TENSORS", ()))
    return decoder


@torch.no_grad()
def check_shapes(decoder: Decoder) -> None:
    """Run the first and the last token at the first and the last position. Raises one of SHAPE_ERRORS."""
    s = decoder.spec
    ids = torch.tensor([0, s.vocab_size - 1])
    pos = torch.tensor([0, s.max_position_embeddings - 1])

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, params: AttentionParams) -> Tensor:
        a = s.kv_cache.attention(layer)
        G = a.num_kv_heads if s.kv_cache.cached_layer(layer) == layer else 0
        if (q.shape[1:], k.shape[1:], v.shape[1:]) != ((s.num_heads, a.k_dim), (G, a.k_dim), (G, a.v_dim)):
            raise RuntimeError(f"layer {layer} has heads q {q.shape[1:]}, k {k.shape[1:]}, v {v.shape[1:]}")
        params.check(s.num_heads, a.num_kv_heads, a.k_dim)
        return q.new_zeros(len(q), s.num_heads, a.v_dim)

    x = decoder.forward(ids, pos, attend)
    if x.shape[1] != s.hidden_size:
        raise RuntimeError(f"hidden states of {x.shape[1]} numbers where hidden_size is {s.hidden_size}")
    logits = decoder.compute_logits(x)
    if logits.shape[1] != s.vocab_size:
        raise RuntimeError(f"{logits.shape[1]} logits for a vocabulary of {s.vocab_size}")


def check_all_tensors_used(weights: Weights, ignored: tuple[str, ...]) -> None:
    """Raise ValueError for a tensor of the checkpoint that the model does not use: its answers would be other ones.

    Not for those of known names that mean nothing (`ignored`, regular expressions of their ends). Biases of modules
    whose family or config says that they have none are left out with a warning, as in transformers and vLLM: exports
    from quantized weights have such biases, of zeros.
    """
    meaningless = re.compile(rf"(^|.*\.)({'|'.join([*IGNORED_TENSORS, *ignored])})")
    unused = [name for name in weights.unused_names() if not meaningless.fullmatch(name)]
    denied = [name for name in unused if weights.uses(f"{name.removesuffix('bias')}weight")]
    model_type = weights.config["model_type"]
    if unknown := sorted(set(unused) - set(denied)):
        raise ValueError(f"{describe_tensors(unknown)} that a {model_type} model with this config does not use")
    if denied:
        found = describe_tensors(denied)
        logger.warning("%s that a %s model with this config does not have: they are left out", found, model_type)


def describe_tensors(names: list[str]) -> str:
    """Return the beginning of a sentence: the first of these tensors of the file, and how many more there are."""
    others = f" and {len(names) - 1} more tensors" if len(names) > 1 else ""
    return f"the model file has {quote(names[0])}{others}"
