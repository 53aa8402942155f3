"""A family that lives in tests only, whose layers cache states: a short convolution, linear attention, and attention.

The model type is "state"; the fixture makes it known to a test. `plain_logits` computes the same model in torch, token
by token, without slots or folds. VARIANTS are further model types, with other sizes.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from retain.kernels import ops
from retain.kernels.attention_params import AttentionParams
from retain.kernels.linear_attention import GatedDeltaRule, LinearAttention, Mamba2Rule
from retain.kernels.ops import Buffer, Operation
from retain.kernels.slots.kv_cache_spec import (
    ConvolutionSpec,
    FullAttentionSpec,
    LayerCacheSpec,
    LinearStateSpec,
    LinearTokensSpec,
)
from retain.models.decoder import Attention, Decoder, ModelSpec
from retain.models.families import llama
from retain.models.family_config import add_defaults
from retain.models.layers import Embedding, RMSNorm, load_linear, load_lm_head
from retain.models.weights import Weights
from tests.helpers import tiny_models
from tests.helpers.extra_family import add_family

STATE = "state"
EPS = 1e-5
WINDOW = 4
HEADS = (2, 4)  # of keys and of values
STEP_LIMITS = (0.2, 1.0)  # of Mamba-2
CONFIG = {
    **{k: tiny_models.LLAMA[k] for k in ("vocab_size", "hidden_size", "num_attention_heads")},
    "max_position_embeddings": 512,
    "kinds": "clacl",  # convolution, linear attention, attention; m is Mamba-2
    "key_dim": 16,
    "value_dim": 8,
    "head_dim": 16,
}
VARIANTS = {
    STATE: CONFIG,
    "state_parts": {**CONFIG, "kinds": "la", "key_dim": 72, "head_dim": 32},  # a state takes three pages
    "state_mamba2": {**CONFIG, "kinds": "mcam", "key_dim": 40},  # a state takes two pages
    "state_pages": {**CONFIG, "head_dim": 128},  # pages of states have more slots than those of attention
}


def layers_of(c: Mapping[str, Any]) -> tuple[tuple[LayerCacheSpec, ...], list[int]]:
    """Return what all layers cache, and the first cache of each layer."""
    H = c["num_attention_heads"]
    E = c["hidden_size"]
    D = c["key_dim"]
    V = c["value_dim"]
    caches: list[LayerCacheSpec] = []
    first = []
    for kind in c["kinds"]:
        first.append(len(caches))
        if kind == "c":
            caches.append(ConvolutionSpec(2, E // 4, E // 4, WINDOW))
        elif kind in "lm":
            caches += [LinearTokensSpec(HEADS[1], D, V), LinearStateSpec(HEADS[1], D, V)]
        else:
            caches.append(FullAttentionSpec(H, c["head_dim"], c["head_dim"]))
    return tuple(caches), first


def spec_from_config(c: Mapping[str, Any]) -> ModelSpec:
    """Read the spec from config.json."""
    c = add_defaults(c, llama.DEFAULTS)
    return ModelSpec(
        vocab_size=c["vocab_size"],
        hidden_size=c["hidden_size"],
        num_heads=c["num_attention_heads"],
        max_position_embeddings=c["max_position_embeddings"],
        caches=layers_of(c)[0],
        attention=AttentionParams(0.3),
    )


@dataclass(frozen=True)
class StateLayer:
    """Compute x += f(norm(x)) where f is one of the four."""

    spec: ModelSpec
    kind: str
    first: int  # the number of the layer's first cache
    w: Weights
    key_dim: int
    value_dim: int

    def emit(self, x: Buffer) -> Iterator[Operation]:
        """Yield the operations of the layer."""
        E = self.spec.hidden_size
        h = Buffer("h", E)
        yield from RMSNorm(self.w["norm.weight"], EPS).emit(x, h)
        if self.kind == "a":
            qkv = load_linear(self.w, "qkv", bias=False)
            yield from Attention(self.first, self.spec, qkv, load_linear(self.w, "out", bias=False)).emit(
                h, x, add=True
            )
            return
        if self.kind == "c":
            y = Buffer("convolved", E)
            yield ops.Convolve(h, y, self.first, self.w["conv.weight"].float(), self.w["conv.bias"].float())
        else:
            rule = Mamba2Rule(self.w["skip"].float(), STEP_LIMITS) if self.kind == "m" else GatedDeltaRule()
            decay, time_bias = -self.w["decay"].float().abs(), self.w["time_bias"].float()
            p = LinearAttention(*HEADS, self.key_dim, self.value_dim, decay, time_bias, rule)
            qkv = Buffer("linear qkv", p.qkv_width)
            gates = Buffer(f"gates {p.gates_width}", p.gates_width)
            y = Buffer("attended", HEADS[1] * self.value_dim)
            yield from load_linear(self.w, "qkv", bias=False).emit(h, qkv)
            yield from load_linear(self.w, "gates", bias=False).emit(h, gates)
            # The delta rule needs keys of length 1.
            norms = torch.full((2 * HEADS[0], self.key_dim), self.key_dim**-0.5)
            yield ops.Norm(qkv, qkv, norms, None, 1e-6, subtract_mean=False)
            yield ops.AttendLinearly(qkv, gates, y, (self.first, self.first + 1), p)
        yield from load_linear(self.w, "out", bias=False).emit(y, x, add=True)


def build(w: Weights) -> Decoder:
    """Build the decoder."""
    w = w.with_defaults(llama.DEFAULTS)
    c = w.config
    s = spec_from_config(c)
    first = layers_of(c)[1]
    table = w.load_matrix("embed.weight", embedding=True)

    def load_layer(i: int) -> Any:
        return StateLayer(s, c["kinds"][i], first[i], w.scope(f"layers.{i}."), c["key_dim"], c["value_dim"])

    norm = RMSNorm(w["norm.weight"], EPS)
    head = load_lm_head(w, "lm_head", table, None)
    return Decoder(s, Embedding(table), load_layer, norm, head, num_layers=len(c["kinds"]))


def shapes(c: dict[str, Any]) -> tiny_models.Shapes:
    E, H, D, V = c["hidden_size"], c["num_attention_heads"], c["key_dim"], c["value_dim"]
    yield "embed.weight", (c["vocab_size"], E)
    for i, kind in enumerate(c["kinds"]):
        p = f"layers.{i}."
        yield p + "norm.weight", (E,)
        if kind == "a":
            yield p + "qkv.weight", (3 * H * c["head_dim"], E)
            yield p + "out.weight", (E, H * c["head_dim"])
        elif kind == "c":
            yield p + "conv.weight", (E, WINDOW)
            yield p + "conv.bias", (E,)
            yield p + "out.weight", (E, E)
        else:
            yield p + "qkv.weight", (2 * HEADS[0] * D + HEADS[1] * V, E)
            yield p + "gates.weight", (HEADS[1] if kind == "m" else 2 * HEADS[1], E)
            if kind == "m":
                yield p + "skip", (HEADS[1],)
            yield p + "decay", (HEADS[1],)
            yield p + "time_bias", (HEADS[1],)
            yield p + "out.weight", (E, HEADS[1] * V)
    yield "norm.weight", (E,)
    yield "lm_head.weight", (c["vocab_size"], E)


def plain_logits(tokens: Sequence[int], model_type: str = STATE, seed: int = 0) -> Tensor:
    """Return the logits [T, V] of a text, by torch alone."""
    file = tiny_models.tiny_checkpoint(model_type, seed)
    c = file.config
    x = file.read("embed.weight")[list(tokens)]
    for i, kind in enumerate(c["kinds"]):
        w = {n.removeprefix(f"layers.{i}."): file.read(n) for n in file.shapes if n.startswith(f"layers.{i}.")}
        h = rms_norm(x, w["norm.weight"])
        y = {"c": plain_convolution, "l": plain_recurrence, "m": plain_recurrence, "a": plain_attention}[kind](h, w, c)
        x = x + y @ w["out.weight"].T
    return rms_norm(x, file.read("norm.weight")) @ file.read("lm_head.weight").T


def plain_convolution(h: Tensor, w: dict[str, Tensor], c: Mapping[str, Any]) -> Tensor:
    return F.conv1d(F.pad(h.T, (WINDOW - 1, 0)), w["conv.weight"][:, None], w["conv.bias"], groups=h.shape[1]).T


def plain_attention(h: Tensor, w: dict[str, Tensor], c: Mapping[str, Any]) -> Tensor:
    q, k, v = (h @ w["qkv.weight"].T).view(len(h), 3, c["num_attention_heads"], -1).permute(1, 2, 0, 3)
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.3).transpose(0, 1).flatten(1)


def plain_recurrence(h: Tensor, w: dict[str, Tensor], c: Mapping[str, Any]) -> Tensor:
    """Return the gated delta rule, or Mamba-2, as a recurrence: the state changes with each token."""
    K, H = HEADS
    D = c["key_dim"]
    qk, v = torch.split(h @ w["qkv.weight"].T, [2 * K * D, H * c["value_dim"]], dim=1)
    qk = qk.view(len(h), 2, K, D)
    q, k = (qk / (qk.square().mean(-1, keepdim=True) + 1e-6).sqrt() * D**-0.5).repeat_interleave(H // K, 2).unbind(1)
    a, *b = (h @ w["gates.weight"].T).split(H, 1)
    steps = F.softplus(a + w["time_bias"])
    steps = steps if b else steps.clamp(*STEP_LIMITS)
    decay = (-w["decay"].abs() * steps).exp()
    state = torch.zeros(H, D, c["value_dim"])
    outputs = []
    for t in range(len(h)):
        state = decay[t, :, None, None] * state
        value = v[t].view(H, -1)
        if b:
            added = b[0][t].sigmoid()[:, None] * (value - torch.einsum("hd,hdv->hv", k[t], state))
            skipped = torch.zeros_like(value)
        else:
            added = steps[t, :, None] * value
            skipped = w["skip"][:, None] * value
        state = state + torch.einsum("hd,hv->hdv", k[t], added)
        outputs.append((torch.einsum("hd,hdv->hv", q[t], state) + skipped).flatten())
    return torch.stack(outputs)


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    """Normalize rows by the root of their mean square."""
    return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * weight


@pytest.fixture
def state_family(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Make the family known to a test; gives its model type."""
    add_state_families(monkeypatch)
    yield STATE


def add_state_families(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the family and its variants known."""
    for model_type, config in VARIANTS.items():
        add_family(monkeypatch, model_type, sys.modules[__name__], config, shapes)
