"""A model with its cache: fresh tokens in, logits out. What is not known here: requests, sampling.

Where the backend has a program of the model, a step is one call of it; else it goes layer by layer through torch.
"""

from __future__ import annotations

from types import ModuleType
from typing import Protocol

import torch
from torch import Tensor

from retain.engine.batch import Batch
from retain.kernels.api import Program
from retain.kv.memory.cache import Cache
from retain.models.decoder import Decoder


class Runner(Protocol):
    """Computes a batch: every layer writes its keys and values into slots, then looks."""

    def forward(self, batch: Batch) -> Tensor:
        """Float32 logits [N, V] of the tokens that `batch.wanted` names; good until the next step."""
        ...


class ProgramRunner:
    """By a program."""

    def __init__(self, program: Program, cache: Cache):
        self.program, self.cache = program, cache

    def forward(self, batch: Batch) -> Tensor:
        """See Runner."""
        tables = batch.tables or self.cache.device_tables.build_tables(batch.rows, batch.query_start_loc)
        b = batch
        return self.program.run(
            self.cache.kv,
            tables,
            b.slot_mapping,
            b.input_ids,
            b.positions,
            b.logits_indices,
            b.attention_scoring,
            b.before_attention,
            b.after_attention,
        )


class TorchRunner:
    """By the model's own parts, the definition, with the backend's `write` and `attend` between."""

    def __init__(self, model: Decoder, backend: ModuleType, cache: Cache):
        self.model, self.backend, self.cache = model, backend, cache
        slopes = model.spec.alibi_slopes
        self.alibi_slopes = None if slopes is None else torch.tensor(slopes)  # [H]

    @torch.no_grad()
    def forward(self, batch: Batch) -> Tensor:
        """See Runner."""
        kv, scale = self.cache.kv, self.model.spec.scale
        tables = batch.tables or self.cache.device_tables.build_tables(batch.rows, batch.query_start_loc)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            if batch.before_attention:
                batch.before_attention(layer, q)
            self.backend.write(kv, batch.slot_mapping[layer], k, v, batch.positions)
            o: Tensor = self.backend.attend(
                *(
                    q,
                    kv,
                    tables.for_layer(layer),
                    batch.positions,
                    scale,
                    self.alibi_slopes,
                    batch.attention_scoring,
                    layer,
                )
            )
            if batch.after_attention:
                batch.after_attention(layer)
            return o

        x = self.model.forward(batch.input_ids, batch.positions.long(), attend)  # [T, E]
        return self.model.compute_logits(x[batch.logits_indices])
