"""Load models and draft heads as programs of a backend. Does not depend on: the engine's requests, its cache's rows."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from retain import kernels, models
from retain.config import Config
from retain.engine.drafters import DrafterNeeds
from retain.engine.runner import HeadRunner, ProgramRunner
from retain.formats.checkpoint import Checkpoint, metadata_reader, open_checkpoint
from retain.formats.pooling import Pooling, choose_pooling
from retain.gates.loader import GateLoader
from retain.kernels.api import CPU, Backend
from retain.kernels.ranks import ALL_HEADS, KVHeads, ProcessGroup
from retain.kernels.slots.pool_dtypes import pool_dtype
from retain.kv.eviction.view import KeyTransform
from retain.models.adapter_bank import AdapterBank
from retain.models.decoder import Decoder, ModelSpec
from retain.models.layers import Embedding
from retain.models.resolve import resolve_model
from retain.models.weights import open_weights
from retain.processing.tokenizer import Tokenizer

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class LoadedModel:
    """A model in memory. `key_transform` is of the keys in its cache; `rope_fingerprint` says how they rotate.

    `embedding` is there where the program gives hidden states, for a draft head. `head` is one that was loaded with it.
    """

    path: Path
    spec: ModelSpec
    runner: ProgramRunner
    key_transform: KeyTransform
    rope_fingerprint: str = ""
    embedding: Embedding | None = None
    head: HeadRunner | None = None
    head_path: Path | None = None  # of its file, where it is not the model's
    kv_heads: KVHeads = ALL_HEADS  # of attention, that this rank has

    def gate_loader(self, default_file: str = "") -> GateLoader:
        """Return what loads the gates of this model; `default_file` is of policies that name none."""
        return GateLoader(self.path, self.spec.kv_cache, default_file, self.kv_heads)


@dataclass(frozen=True)
class ProgramOptions:
    """What a program is beside a model: what a drafter needs, adapters, ranks, or states in place of logits."""

    needs: DrafterNeeds = field(default_factory=DrafterNeeds)
    adapters: AdapterBank | None = None
    group: ProcessGroup | None = None
    pools: bool = False


def load_with_tokenizer(
    c: Config, backend: Backend, device: torch.device, progress: bool, options: ProgramOptions
) -> tuple[LoadedModel, Tokenizer, Pooling | None]:
    """Load the model of a configuration; see `load_model`. One that embeds gives states in place of other outputs."""
    path = resolve_model(c.model)
    checkpoint = open_checkpoint(path)
    reader = metadata_reader(checkpoint)
    pooling = choose_pooling(path, c.pooling, reader)
    options = replace(options, pools=pooling is not None)
    tokenizer = Tokenizer.open(path, reader)  # before the weights: what it takes for a moment is free again then
    loaded = load_model(
        path, backend, pool_dtype(c.dtype), c.weights, progress, device, c.max_model_len, options, checkpoint
    )
    return loaded, tokenizer, pooling


def load_model(
    path: Path,
    backend: Backend,
    dtype: torch.dtype,
    weights: str,
    progress: bool = False,
    device: torch.device = CPU,
    context_limit: int | None = None,
    options: ProgramOptions = ProgramOptions(),  # frozen
    checkpoint: Checkpoint | None = None,
) -> LoadedModel:
    """Load a model for a backend, as a program, and perhaps a draft head, as another. Raises ValueError or OSError.

    `context_limit`: the longest text, by default the model's own; some models have other frequencies for long ones.
    `checkpoint`: that of `path` where it is open already.
    Where a program packs weights, nothing of the file outlives this call, unless the caller holds `checkpoint`, or for
    hidden states the token embeddings, which a head reads: the cache may take the memory.
    """
    kernels.check_dtype(backend, dtype)
    program = backend.program(dtype, device)
    needs = DrafterNeeds() if options.pools else options.needs
    sizes = program.vector_dtype, context_limit
    opened = open_weights(path, dtype, weights, progress, *sizes, not options.pools, checkpoint)
    opened = opened.with_passes(options.adapters, options.group)
    head = None
    head_path = resolve_model(needs.head) if needs.head else None
    if needs.head is None:
        decoder = models.build(opened, program, needs.hidden_states)
    else:
        own = open_weights(head_path, dtype, needs.weights, False, *sizes) if head_path else None
        head_program = backend.program(dtype, device, program)
        decoder, built = models.build_with_head(opened, program, head_program, own)
        head = HeadRunner(head_program, built.hidden_size, built.restrict)
    log.info("loaded %s: %s, weights %s, on %s", path.name, type(decoder).__name__, weights, device)
    embedding = decoder.token_embedding if needs.hidden_states else None
    ropes = [(rope.freqs.tolist(), rope.attention_factor) for rope in decoder.ropes]
    transform = build_key_transform(decoder)
    return LoadedModel(
        path,
        decoder.spec,
        ProgramRunner(program),
        transform,
        repr(ropes),
        embedding,
        head,
        head_path,
        decoder.kv_heads,
    )


def build_key_transform(decoder: Decoder) -> KeyTransform:
    """Return how cached keys differ from those of a model whose layers are loaded."""
    rotate = decoder.ropes[0].shift if decoder.ropes else None
    attention = {cache: (op.params, op.rope) for cache, op in decoder.attention.items()}
    return KeyTransform(rotate, decoder.key_factors, attention)
