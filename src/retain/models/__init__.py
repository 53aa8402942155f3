"""Models: from token ids to logits.

Each family is one file in families/, named like its Hugging Face `model_type`.
Does not depend on: requests, the cache, sampling, text.
"""

from __future__ import annotations

import importlib
import logging
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import ModuleType
from typing import Protocol

import torch
from torch import Tensor

from retain.files import quote, shorten
from retain.kernels.ops import Operation, WidthError
from retain.kernels.ranks import ALL_HEADS, RankHeads
from retain.kernels.weights.weight import Weight
from retain.models import eagle3, mtp
from retain.models.decoder import Decoder
from retain.models.family_config import check_supported
from retain.models.heads import DraftHead, HeadTarget, load_head
from retain.models.passes.adapt import adapt
from retain.models.passes.balance import balance
from retain.models.passes.headless import headless
from retain.models.passes.note_attention import note_attention
from retain.models.passes.shard import shard, shard_spec
from retain.models.passes.tap import tap
from retain.models.passes.write_head import CachedHead, write_head
from retain.models.weights import Weights
from retain.plugins import plugin_names

logger = logging.getLogger(__name__)
VALUE_ERRORS = (ArithmeticError, AttributeError, TypeError)  # raised by a value of the config of another type
SHAPE_ERRORS = (IndexError, RuntimeError, WidthError)  # raised by tensors whose sizes disagree
IGNORED_TENSORS = (r"rotary_emb\.inv_freq",)  # written by old versions of transformers; each family may have more


def list_families() -> list[str]:
    """Return the names of all families, sorted."""
    return plugin_names(f"{__name__}.families")


def load_family(model_type: str) -> ModuleType:
    """Import a family's module, which has `spec_from_config` and `build`. Raises ValueError for an unknown family."""
    if model_type not in list_families():
        raise ValueError(f"model type {quote(model_type)} is not supported: one of {', '.join(list_families())}")
    return importlib.import_module(f"{__name__}.families.{model_type}")


class Target(Protocol):
    """The part of a `Program` that a model is loaded into."""

    def load(self, operations: Iterable[Operation]) -> None:
        """Append all operations of a model."""

    def row_energies(self, weight: Weight, factors: Tensor) -> Tensor:
        """Return the sum of factors[i] * w[i]^2 over each row w."""


def build(weights: Weights, program: Target, gives_states: bool = False) -> Decoder:
    """Build the decoder of a checkpoint, and load its operations into a program, which checks every shape.

    Without a head the program returns the states that the head would read. With `gives_states` it gives both.

    Raises ValueError when the config lacks a key, asks for a feature that the family does not compute, or does not
    match the tensors, and for a tensor that the family does not use.
    """
    family = find_family(weights)
    with explained_errors():
        decoder: Decoder = family.build(weights)
        operations = make_operations(decoder, weights, program)
        program.load(tap(operations) if gives_states else operations)
        if weights.group is not None:
            spec = shard_spec(decoder.spec, weights.group.size)
            has_all = spec.caches == decoder.spec.caches
            heads = ALL_HEADS if has_all else RankHeads(weights.group, decoder.spec.num_heads, spec.num_heads)
            decoder = replace(decoder, spec=spec, kv_heads=heads)
    check_all_tensors_used(weights, ignored_tensors(family, weights))
    return decoder


def build_with_head(
    weights: Weights, program: Target, head_program: Target, head_weights: Weights | None = None
) -> tuple[Decoder, CachedHead]:
    """Build a decoder and a draft head, whose layer is the last cache of its spec, and load each into a program.

    `head_weights` are those of an EAGLE-3 head. Without them the head is the MTP layer of the model's own
    file. Raises ValueError as `build` does.
    """
    family = find_family(weights)
    head: CachedHead
    with explained_errors():
        if head_weights is None:
            extended = mtp.extend(weights, family)
            decoder, head = mtp.split(family.build(extended), extended, family)
        else:
            target = family.build(weights)
            with explained_errors("the draft head"):
                decoder, head = eagle3.attach(target, head_weights)
        program.load(write_head(make_operations(decoder, weights, program), head))
    with explained_errors("the draft head"):
        head_program.load(head.emit())
    check_all_tensors_used(weights, ignored_tensors(family, weights))
    if head_weights is not None:
        check_all_tensors_used(head_weights, eagle3.IGNORED_TENSORS)
    return decoder, head


def find_family(weights: Weights) -> ModuleType:
    """Return the family's module of a checkpoint. Raises ValueError for an unknown one, or an unsupported config."""
    family = load_family(weights.config["model_type"])
    if not getattr(family, "READS_PER_LAYER_CONFIG", False):
        check_supported(weights.config, per_layer_config=None)  # of transformers, in every family
    return family


def make_operations(decoder: Decoder, weights: Weights, program: Target) -> Iterator[Operation]:
    """Return the operations of a decoder behind the passes that all programs of models have."""
    spec = decoder.spec
    operations = balance(decoder.emit(), spec.kv_cache, decoder.key_factors, program.row_energies)
    if weights.group is not None:
        operations = shard(operations, spec, weights.group, decoder.key_factors)
    if weights.adapters is not None:
        operations = adapt(operations, weights.adapters)
    operations = note_attention(operations, decoder.attention)
    return operations if weights.has_head else headless(operations, spec.hidden_size, spec.vocab_size, weights.dtype)


def ignored_tensors(family: ModuleType, weights: Weights) -> tuple[str, ...]:
    """Return what matches the ends of the names of tensors that a model may leave out, as regular expressions."""
    ignored: tuple[str, ...] = getattr(family, "IGNORED_TENSORS", ())
    if hasattr(family, "MTP_LAYER"):
        ignored = (*ignored, *family.MTP_LAYER.tensor_names(weights.config))
    return ignored


def build_head(weights: Weights, target: HeadTarget, program: Target) -> DraftHead:
    """Build the draft head of a checkpoint, and load its operations into a program. Raises ValueError as `build`."""
    module = load_head(weights.config["model_type"])
    with explained_errors("the draft head"):
        head: DraftHead = module.build(weights, target)
        program.load(head.operations)
    check_all_tensors_used(weights, ())
    return head


@contextmanager
def explained_errors(subject: str = "the model") -> Iterator[None]:
    """Raise ValueError in place of what values of a config, shapes of tensors, and too little memory raise."""
    try:
        yield
    except torch.OutOfMemoryError as e:
        raise ValueError(f"{subject} does not fit the memory of the device: {shorten(e)}") from e
    except VALUE_ERRORS as e:
        raise ValueError(f"config.json has a value that cannot be used: {shorten(e)}") from e
    except SHAPE_ERRORS as e:
        raise ValueError(f"the tensors of {subject} do not fit its config: {shorten(e)}") from e


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
