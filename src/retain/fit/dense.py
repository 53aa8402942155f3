"""A model whose attention is written out: every weight of every query is there to be read, or to be differentiated."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from retain import models
from retain.kernels import reference
from retain.kernels.api import CPU
from retain.kernels.attention_params import AttentionParams
from retain.kernels.reference.softmax import adjust_scores, softmax
from retain.models.weights import Weights

EVERY = slice(None)
NOTHING = slice(0, 0)


@dataclass(frozen=True)
class LayerAttention:
    """What one layer's attention computed, of T queries over n tokens. Heads are grouped: G kv heads of R query heads.

    `output` is what a gradient is kept for, where there is one.
    """

    layer: int
    queries: Tensor  # [G, R, T, D], rotated
    keys: Tensor  # [G, n, D], rotated
    values: Tensor  # [G, n, D]
    weights: Tensor  # [G, R, T, n]
    output: Tensor  # [G, R, T, D]


@dataclass
class Past:
    """Keys and values of all layers, [n, G, D] each, that later tokens attend to."""

    keys: dict[int, Tensor] = field(default_factory=dict)
    values: dict[int, Tensor] = field(default_factory=dict)


class DenseModel:
    """Compute tokens with float32 attention over all earlier ones, in a program of the reference backend."""

    def __init__(self, weights: Weights):
        self.program = reference.program(torch.float32, CPU)
        self.decoder = models.build(weights, self.program)
        self.spec = self.decoder.spec

    @property
    def full_layers(self) -> list[int]:
        """The layers without a window, [M]."""
        return [i for i, window in enumerate(self.spec.kv_cache.windows) if window is None]

    def forward(
        self,
        tokens: Sequence[int],
        on_attention: Callable[[LayerAttention], None] | None = None,
        past: Past | None = None,
        kept: Mapping[int, Tensor] | None = None,
        needs_grad: bool = False,
        predicting: slice = NOTHING,
    ) -> tuple[Tensor, Past]:
        """Compute tokens behind `past`, and keep their own keys and values.

        Returns the log-probabilities [N, V] of what follows the tokens[predicting]. `kept` [G, n] marks, by layer, the
        tokens of `past` that may be seen. With `needs_grad` the result can be differentiated by every layer's `output`.
        """
        s = self.spec
        present = Past()
        first = len(next(iter(past.keys.values()))) if past else 0
        pos = torch.arange(first, first + len(tokens))

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, params: AttentionParams) -> Tensor:
            present.keys[layer] = k.detach()
            present.values[layer] = v.detach()
            if past:
                k = torch.cat((past.keys[layer], k))
                v = torch.cat((past.values[layer], v))
            mask = self._visible(layer, pos, len(k))
            if kept and layer in kept:
                fresh = torch.ones(s.kv_cache.attention(layer).num_kv_heads, len(k) - first, dtype=torch.bool)
                mask = mask & torch.cat((kept[layer], fresh), 1)[:, None, None]
            found = self._attend(layer, q, k.transpose(0, 1), v.transpose(0, 1), mask, params)
            if needs_grad:
                found.output.requires_grad_().retain_grad()
            if on_attention:
                on_attention(found)
            return found.output.flatten(0, 1).transpose(0, 1)

        with torch.set_grad_enabled(needs_grad):
            logits = self.program.compute(torch.tensor(tokens), pos, torch.arange(len(tokens))[predicting], attend)
            return logits.log_softmax(-1), present

    def _attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, params: AttentionParams
    ) -> LayerAttention:
        """Attend with queries [T, H, D] over k and v [G, n, D]."""
        T = len(q)
        G = len(k)
        queries = q.transpose(0, 1).reshape(G, -1, T, q.shape[-1])
        places = torch.arange(k.shape[1])
        products = (queries.flatten(1, 2) @ k.transpose(1, 2) * params.scale).view(-1, T, len(places))  # [H, T, n]
        scores = adjust_scores(products, places - places[-T:, None], params)
        sinks = None if params.sink_logits is None else params.sink_logits.view(G, -1, 1, 1)
        scores = scores.view(G, -1, T, len(places)).masked_fill(~mask, -torch.inf)
        weights = softmax(scores, sinks)
        return LayerAttention(layer, queries, k, v, weights, weights @ v[:, None])

    def _visible(self, layer: int, pos: Tensor, num_tokens: int) -> Tensor:
        """Return which tokens each query sees, bool [T, n]."""
        distance = pos[:, None] - torch.arange(num_tokens)
        window = self.spec.kv_cache.windows[layer]
        return (distance >= 0) & (distance < (window or num_tokens))
