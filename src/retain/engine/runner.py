"""Runners compute a batch: fresh tokens in, logits out, with K and V in the slots of a cache.

Where the backend has a program of the model, a step is one call of it; else it goes layer by layer through torch.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from retain.kernels.api import Backend, Batch, Program
from retain.kernels.attention_params import AttentionParams
from retain.kv.manager import KVCacheManager
from retain.models.decoder import Decoder


class Runner(Protocol):
    """Compute a batch: every layer writes its keys and values into slots, then attends."""

    def forward(self, batch: Batch) -> Tensor:
        """Return float32 logits [N, V] of the tokens `batch.logits_indices`; good until the next step."""
        ...


class ProgramRunner:
    """Run a model as one program of the backend."""

    def __init__(self, program: Program, cache: KVCacheManager):
        self.program = program
        self.cache = cache

    def forward(self, batch: Batch) -> Tensor:
        """See Runner.forward."""
        return self.program.run(batch)


class TorchRunner:
    """Run a model's own layers, the definition, with the backend's `write` and `attend` between them."""

    def __init__(self, model: Decoder, backend: Backend, cache: KVCacheManager):
        self.model = model
        self.backend = backend
        self.cache = cache

    @torch.no_grad()
    def forward(self, batch: Batch) -> Tensor:
        """See Runner.forward."""

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, params: AttentionParams) -> Tensor:
            if batch.before_attention:
                batch.before_attention(layer, q)
            inputs = batch.layer(layer)
            has_kv = k.shape[1] > 0
            if has_kv:
                self.backend.write(inputs.kv, inputs.slot_mapping, k, v, batch.positions)
            scoring = batch.scoring if has_kv else None
            o = self.backend.attend(q, inputs.kv, inputs.tables, batch.positions, params, scoring=scoring, layer=layer)
            if batch.after_attention:
                batch.after_attention(layer)
            return o

        x = self.model.forward(batch.input_ids, batch.positions.long(), attend)  # [T, E]
        return self.model.compute_logits(x[batch.logits_indices])
