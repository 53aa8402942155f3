"""Models as programs of the reference backend, and a run of one step by step on a cache that evicts nothing."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from retain import models
from retain.kernels import reference
from retain.kernels.api import CPU, KV, NO_WINDOW, Batch, GroupInputs, Tables
from retain.kernels.ops import Attend
from retain.kernels.reference.operations import AttendToCache
from retain.kernels.reference.program import ReferenceProgram
from retain.models.decoder import Decoder, ModelSpec
from retain.models.passes.balance import balance
from retain.models.weights import Weights


@functools.cache
def random_tokens(n: int, seed: int = 0) -> Tensor:
    return torch.randint(128, (n,), generator=torch.Generator().manual_seed(seed))


@dataclass(frozen=True)
class ReferenceModel:
    """A decoder that is emitted into a program of the reference backend."""

    decoder: Decoder
    program: ReferenceProgram

    @property
    def spec(self) -> ModelSpec:
        return self.decoder.spec

    @property
    def key_offsets(self) -> dict[int, Tensor]:
        """The offsets of keys, [G, D], of the layers that have one."""
        operations = balance(self.decoder.emit(), self.spec.kv_cache, {})
        found = {op.cache: op.params.key_offset for op in operations if isinstance(op, Attend)}
        return {cache: offset for cache, offset in found.items() if offset is not None}

    def compute(self, ids: Tensor, pos: Tensor, attend: AttendToCache) -> Tensor:
        """Return the logits [T, V] of all tokens."""
        return self.program.compute(ids, pos, torch.arange(len(ids)), attend)


def build_model(weights: Weights) -> ReferenceModel:
    """Build a model of these weights. Raises ValueError as `models.build` does."""
    program = reference.program(weights.dtype, CPU)
    return ReferenceModel(models.build(weights, program), program)


class ReferenceCache:
    """A cache of the reference backend that evicts nothing: each layer and request owns a table of pages in order."""

    PAGE_SIZE = 4

    def __init__(self, spec: ModelSpec, num_requests: int, length: int, dtype: torch.dtype = torch.float32):
        self.spec, n = spec.kv_cache.fold_at(self.PAGE_SIZE), -(-length // self.PAGE_SIZE)
        self.layers: dict[int, tuple[KV, Tensor]] = {}  # memory and pages [B, G, n] of each layer with a cache
        for group in self.spec.groups:
            for layer in group.caches:
                pages = torch.arange(num_requests * group.num_kv_heads * n, dtype=torch.int32) + 1
                numbers = torch.float32 if group.is_state else dtype
                kv = reference.allocate(1 + len(pages), self.PAGE_SIZE, group.k_dim, numbers, v_dim=group.v_dim)
                kv.pos.fill_(-1)
                self.layers[layer] = kv, pages.view(num_requests, group.num_kv_heads, n)

    def run(self, model: ReferenceModel, ids: Tensor, pos: Tensor, counts: Sequence[int], shift: int = 0) -> Tensor:
        """Return the logits [T, V] of a step with `counts` fresh tokens of each request, at positions `pos` [T].

        The model sees them at positions that are `shift` larger; their slots stay.
        """
        starts = torch.tensor([0, *counts]).cumsum(0).int()
        rows = torch.arange(len(counts), dtype=torch.int32)
        request_of_token = rows.long().repeat_interleave(torch.tensor(counts))  # [T]
        groups = []
        for layer, (kv, pages) in self.layers.items():
            slots = pages[request_of_token, :, pos // self.PAGE_SIZE].T * self.PAGE_SIZE + pos % self.PAGE_SIZE
            tables = Tables(
                pages=pages[None],
                counts=torch.full((1, *pages.shape[:2]), pages.shape[2], dtype=torch.int32),
                windows=torch.full((1, *rows.shape), self.spec.windows[layer] or NO_WINDOW, dtype=torch.int32),
                rows=rows,
                query_start_loc=starts,
            )
            groups.append(GroupInputs(kv, tables, slots[None].int()))  # slots [1, G, T]
        places = {layer: (i, 0) for i, layer in enumerate(self.layers)}
        layers = [places[self.spec.source_cache(i)] for i in range(len(self.spec.caches))]
        return model.program.run(Batch(groups, layers, ids, (pos + shift).int(), torch.arange(len(ids))))


@torch.inference_mode()
def run_decoder(
    model: ReferenceModel, texts: Sequence[Tensor], steps: Sequence[Sequence[int]], shift: int = 0
) -> list[Tensor]:
    """Compute the logits of every token of the texts. Each step computes the given number of tokens of each text.

    Their positions begin at `shift`.
    """
    cache = ReferenceCache(model.spec, len(texts), max(map(len, texts)), model.program.dtype)
    num_computed, logits = [0] * len(texts), [[] for _ in texts]
    for counts in steps:
        spans = [slice(n, n + count) for n, count in zip(num_computed, counts, strict=True)]
        pos = torch.cat([torch.arange(span.start, span.stop) for span in spans])
        ids = torch.cat([text[span] for text, span in zip(texts, spans, strict=True)])
        step_logits = cache.run(model, ids, pos, counts, shift)
        for chunk, chunks in zip(step_logits.split(list(counts)), logits, strict=True):
            chunks.append(chunk)
        num_computed = [span.stop for span in spans]
    assert num_computed == list(map(len, texts))
    return [torch.cat(chunks) for chunks in logits]
