"""A model on a device with its cache: fresh tokens in, logits out. What is not known here: requests, sampling."""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from retain.engine.batch import Batch
from retain.kv.cache import Cache
from retain.models.decoder import Decoder


class Runner:
    """Computes a batch: every layer writes its keys and values into slots, then looks."""

    def __init__(self, model: Decoder, cache: Cache, backend: ModuleType):
        self.model, self.cache, self.backend = model, cache, backend
        slopes = model.spec.slopes
        self.slopes = None if slopes is None else torch.tensor(slopes)  # [H]

    @torch.inference_mode()
    def forward(self, batch: Batch) -> Tensor:
        """Float32 logits [N, V] of the tokens that `batch.last` names."""
        kv, scale = self.cache.kv, self.model.spec.scale

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            self.backend.write(kv, batch.slots[layer], k, v, batch.pos)
            tables = self.cache.tables(layer, batch.rows, batch.starts)
            return self.backend.attend(q, kv, tables, batch.pos, scale, self.slopes)

        x = self.model.forward(batch.ids, batch.pos.long(), attend)  # [T, E]
        return self.model.logits(x[batch.last])
