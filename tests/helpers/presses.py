"""Presses in the interface of kvpress, each of another kind of what a press needs. Formulas of the papers, own code."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import repeat_kv, rotate_half


def project(projection: Any, x: Tensor, head_dim: int, norm: Any = None) -> Tensor:
    """Return heads [1, heads, n, D] of hidden states [1, n, E]."""
    heads = projection(x).view(*x.shape[:2], -1, head_dim).transpose(1, 2)
    return heads if norm is None else norm(heads)


class KeyNorm:
    """Keys with small norms stay."""

    compression_ratio = 0.0

    def score(self, module: Any, hidden_states: Tensor, keys: Tensor, *_: Any) -> Tensor:
        return -keys.norm(dim=-1)


class KeyDifference:
    """Keys unlike the mean key stay."""

    def score(self, module: Any, hidden_states: Tensor, keys: Tensor, *_: Any) -> Tensor:
        anchor = (keys / keys.norm(dim=-1, keepdim=True)).mean(2, keepdim=True)
        return -torch.cosine_similarity(keys, anchor, dim=-1)


class WindowAttention:
    """What the newest queries attend to stays, pooled over neighbours; so do their own tokens."""

    compression_ratio = 0.0
    window_size = 8

    def score(
        self, module: Any, hidden_states: Tensor, keys: Tensor, values: Tensor, attentions: None, kwargs: dict[str, Any]
    ) -> Tensor:
        w = self.window_size
        n = keys.shape[2]
        if n <= w:
            raise ValueError("too short")
        cos, sin = (x[:, None, -w:] for x in kwargs["position_embeddings"])
        q = project(module.q_proj, hidden_states[:, -w:], module.head_dim, getattr(module, "q_norm", None))
        q = q * cos + rotate_half(q) * sin
        x = q @ repeat_kv(keys, module.num_key_value_groups).transpose(2, 3) / math.sqrt(module.head_dim)
        x = x.masked_fill(torch.arange(n) > torch.arange(n - w, n)[:, None], -math.inf)
        scores = x.softmax(-1)[..., :-w].mean(2)
        scores = torch.nn.functional.avg_pool1d(scores, 5, 1, 2)
        scores = scores.view(1, keys.shape[1], module.num_key_value_groups, -1).mean(2)
        return torch.nn.functional.pad(scores, (0, w), value=scores.max().item() + 1)


class ExpectedAttention:
    """What normally distributed later queries are expected to attend to stays, times the norm of the value."""

    future = 64

    def score(self, module: Any, hidden_states: Tensor, keys: Tensor, values: Tensor, *_: Any) -> Tensor:
        D = module.head_dim
        G = module.config.num_key_value_heads
        q = project(module.q_proj, hidden_states, D, getattr(module, "q_norm", None))
        n = q.shape[2]
        mean = q.mean(2)
        centred = q - mean[:, :, None]
        covariance = centred.transpose(2, 3) @ centred / n
        cos, sin = module.rotary_emb(mean, torch.arange(n, n + self.future)[None])
        unit = torch.eye(D)
        turn = torch.stack([unit * c + rotate_half(unit) * s for c, s in zip(cos[0], sin[0], strict=True)]).mean(0)
        mean, covariance = mean @ turn, turn.T @ covariance @ turn
        k = repeat_kv(keys, module.config.num_attention_heads // G)
        x = (k @ mean[..., None])[..., 0] / math.sqrt(D) + ((k @ covariance) * k).sum(-1) / D / 2
        return x.softmax(-1).view(1, G, -1, n).mean(2) * values.norm(dim=-1)


class Leverage:
    """Outliers among keys before their rotation stay."""

    compression_ratio = 0.5

    def score(self, module: Any, hidden_states: Tensor, *_: Any) -> Tensor:
        k = project(module.k_proj, hidden_states, module.head_dim, getattr(module, "k_norm", None))
        x = k - k.mean(2, keepdim=True)
        x = x @ torch.randn(module.head_dim, 4)
        gram = x.transpose(2, 3) @ x + 0.01 * torch.eye(4)
        return (1 + self.compression_ratio) * (x * torch.linalg.solve(gram, x.transpose(2, 3)).transpose(2, 3)).sum(-1)


class Failing:
    """Raises, or returns what is no number."""

    def score(self, module: Any, hidden_states: Tensor, keys: Tensor, *_: Any) -> Tensor:
        return torch.full(keys.shape[:3], math.nan)


tuned = WindowAttention()
tuned.window_size = 20
not_a_press = SimpleNamespace()
