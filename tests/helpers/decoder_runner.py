"""Models as programs of the reference backend, and a run of one step by step on a cache that evicts nothing."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from retain import models
from retain.kernels import reference
from retain.kernels.api import CPU, KV, NO_WINDOW, Tables
from retain.kernels.attention_params import AttentionParams
from retain.kernels.reference.program import Attend, ReferenceProgram
from retain.models.decoder import Decoder, ModelSpec
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
        offsets = ((i, self.decoder.load_layer(i).attention.key_offset) for i in range(self.spec.num_layers))
        return {i: offset for i, offset in offsets if offset is not None}

    def compute(self, ids: Tensor, pos: Tensor, attend: Attend) -> Tensor:
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
        self.spec, n = spec, -(-length // self.PAGE_SIZE)
        cache = spec.kv_cache
        self.layers: dict[int, tuple[KV, Tensor]] = {}  # memory and pages [B, G, n] of each layer with a cache
        for layer in sorted({cache.cached_layer(i) for i in range(spec.num_layers)}):
            a = cache.attention(layer)
            pages = torch.arange(num_requests * a.num_kv_heads * n, dtype=torch.int32) + 1
            kv = reference.allocate(1 + len(pages), self.PAGE_SIZE, a.k_dim, dtype, v_dim=a.v_dim)
            kv.pos.fill_(-1)
            self.layers[layer] = kv, pages.view(num_requests, a.num_kv_heads, n)

    def make_attend(self, counts: Sequence[int], pos: Tensor) -> Attend:
        """Return the attention of a step with `counts` fresh tokens of each request, at positions `pos` [T]."""
        s, starts = self.spec, torch.tensor([0, *counts]).cumsum(0).int()
        rows = torch.arange(len(counts), dtype=torch.int32)
        request_of_token = rows.long().repeat_interleave(torch.tensor(counts))  # [T]

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, params: AttentionParams) -> Tensor:
            kv, pages = self.layers[s.kv_cache.cached_layer(layer)]
            slots = pages[request_of_token, :, pos // self.PAGE_SIZE].T * self.PAGE_SIZE + pos % self.PAGE_SIZE
            if k.shape[1]:
                reference.write(kv, slots.int(), k, v, pos.int())  # slots [G, T]
            tables = Tables(
                pages=pages,
                counts=torch.full(pages.shape[:2], pages.shape[2], dtype=torch.int32),
                windows=torch.full(rows.shape, s.kv_cache.windows[layer] or NO_WINDOW, dtype=torch.int32),
                rows=rows,
                query_start_loc=starts,
            )
            return reference.attend(q, kv, tables, pos.int(), params)

        return attend


@torch.inference_mode()
def run_decoder(model: ReferenceModel, texts: Sequence[Tensor], steps: Sequence[Sequence[int]]) -> list[Tensor]:
    """Compute the logits of every token of the texts. Each step computes the given number of tokens of each text."""
    cache = ReferenceCache(model.spec, len(texts), max(map(len, texts)), model.program.dtype)
    num_computed, logits = [0] * len(texts), [[] for _ in texts]
    for counts in steps:
        spans = [slice(n, n + count) for n, count in zip(num_computed, counts, strict=True)]
        pos = torch.cat([torch.arange(span.start, span.stop) for span in spans])
        ids = torch.cat([text[span] for text, span in zip(texts, spans, strict=True)])
        step_logits = model.compute(ids, pos, cache.make_attend(counts, pos))
        for chunk, chunks in zip(step_logits.split(list(counts)), logits, strict=True):
            chunks.append(chunk)
        num_computed = [span.stop for span in spans]
    assert num_computed == list(map(len, texts))
    return [torch.cat(chunks) for chunks in logits]
