"""EAGLE-3 (arXiv 2503.01840): a head of one layer, which reads the target's states between three of its layers.

`fc` makes one state of the three. The layer attends to pairs of a token's embedding and the state before it; its next
state is its own output. The head may know a part of the vocabulary alone. Names and defaults are those of vLLM's
llama_eagle3.py; heads of Red Hat's `speculators` have the config of the layer inside.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from retain.files import quote
from retain.formats.config_limits import check_config
from retain.kernels import ops
from retain.kernels.attention_params import AttentionParams
from retain.kernels.ops import LOGITS, Buffer, Operation
from retain.kernels.slots.kv_cache_spec import DraftHeadSpec, FullAttentionSpec
from retain.models import llama_like
from retain.models.decoder import Attention, Decoder, DecoderLayer
from retain.models.family_config import FamilyConfig, add_defaults
from retain.models.heads import Restrict
from retain.models.layers import Embedding, Layer, Linear, RMSNorm, copy_row, load_linear, load_norm
from retain.models.mtp import normalize_last, until_written
from retain.models.rope import get_whole_head_rope
from retain.models.weights import Weights

DEFAULTS: Mapping[str, Any] = {
    **llama_like.DEFAULTS,
    "num_key_value_heads": None,
    "attention_bias": False,
    "norm_before_residual": False,
    "norm_before_fc": False,
    "norm_output": False,
}
IGNORED_TENSORS = ("t2d", "verifier_.*")  # which tokens the head knows, as d2t says; copies of the target's
LAYER_PREFIXES = ("midlayer.", "layers.0.", "model.layers.0.")


def read_config(config: Mapping[str, Any]) -> FamilyConfig:
    """Return the config of a head. Raises ValueError where its layer is none of Llama's."""
    inner = config.get("transformer_layer_config")
    c = {**config, **inner} if isinstance(inner, dict) else dict(config)
    check_config(c)
    if c.get("model_type") not in ("llama", "qwen3", "eagle3") or c.get("num_hidden_layers", 1) != 1:
        raise ValueError(f"a head of {quote(c.get('model_type'))} is not supported: only one layer of Llama or Qwen 3")
    if c.get("fc_norm") or c.get("sliding_window"):
        raise ValueError("fc_norm and sliding windows of a head are not supported")
    return add_defaults(c, DEFAULTS)


def read_layers(c: Mapping[str, Any], num_layers: int) -> list[int]:
    """Return the numbers of the target's layers whose inputs a head reads. Raises ValueError."""
    inner = c.get("eagle_config")
    given = (inner if isinstance(inner, dict) else c).get("eagle_aux_hidden_state_layer_ids")
    layers = [2, num_layers // 2, num_layers - 3] if given is None else given
    if not isinstance(layers, list) or not layers or not all(type(i) is int and 0 <= i < num_layers for i in layers):
        raise ValueError(f"eagle_aux_hidden_state_layer_ids {quote(layers)}: the model has {num_layers} layers")
    return layers


@dataclass(frozen=True, eq=False)
class TappedLayer:
    """A layer of the target whose input is copied to places of a buffer, in states of `width` numbers."""

    layer: DecoderLayer
    features: Buffer
    places: list[int]

    def emit(self, x: Buffer) -> Iterator[Operation]:
        """Yield the operations of the layer, which updates buffer `x` in place."""
        for place in self.places:
            yield copy_row(x, self.features, place * x.width)
        yield from self.layer.emit(x)


@dataclass(frozen=True, eq=False)
class Eagle3Head:
    """A layer between a token with the state before it, and the logits of the token behind it."""

    features: Buffer  # of the target
    feature_norm: RMSNorm | None
    fc: Linear
    embedding: Embedding
    input_norm: RMSNorm
    hidden_norm: RMSNorm
    attention: Attention
    mlp_norm: RMSNorm
    mlp: Layer
    norm: RMSNorm
    lm_head: Linear
    restrict: Restrict | None
    normalizes_first: bool  # whether the layer adds to the normalized state
    passes_normed: bool  # whether the next state is that behind `norm`

    @property
    def hidden_size(self) -> int:
        """Numbers of a state."""
        return self.attention.spec.hidden_size

    def emit_states(self, x: Buffer, states: Buffer) -> Iterator[Operation]:
        """Yield what makes one state of those that layers of the target have left."""
        if self.feature_norm:
            yield from self.feature_norm.emit(self.features, self.features)
        yield from self.fc.emit(self.features, states)

    def emit_writes(self, states: Buffer) -> Iterator[Operation]:
        """Yield what caches all fresh tokens of a step, by their states."""
        x = Buffer("x of the draft head", states.width)
        both = Buffer("token, state", 2 * states.width)
        yield from self._join(ops.LoadHiddenStates(x, states), both)
        yield from until_written(self.attention.emit(both, x, add=True))

    def emit(self) -> Iterator[Operation]:
        """Yield the operations of the program that computes one token of each request."""
        h = self.hidden_size
        x = Buffer("x", h)
        last = Buffer("last", h)
        normed = Buffer("normed", h)
        both = Buffer("token, state", 2 * h)
        yield from self._join(ops.LoadHiddenStates(x), both)
        yield from self.attention.emit(both, x, add=True)
        yield from self.mlp_norm.emit(x, normed)
        yield from self.mlp.emit(normed, x, add=True)
        yield from normalize_last(x, last, self.norm, self.passes_normed)
        yield from self.lm_head.emit(last, Buffer(LOGITS, self.lm_head.weight.shape[0]))

    def _join(self, load: ops.LoadHiddenStates, both: Buffer) -> Iterator[Operation]:
        """Yield what fills the layer's input `both`, and the state that the layer adds to."""
        h = self.hidden_size
        x = load.out
        token = Buffer("token", h)
        state = Buffer("normed state", h)
        yield from self.embedding.emit(token)
        yield from self.input_norm.emit(token, token)
        yield load
        yield from self.hidden_norm.emit(x, state)
        if self.normalizes_first:
            yield copy_row(state, x)
        yield copy_row(token, both)
        yield copy_row(state, both, h)


def attach(decoder: Decoder, w: Weights) -> tuple[Decoder, Eagle3Head]:
    """Return a decoder whose layers leave the states that a head reads, and the head. Raises ValueError."""
    c = read_config(w.config)
    w = w.with_config(c)
    s = decoder.spec
    layers = read_layers(c, s.num_layers)
    heads = c["num_attention_heads"]
    D = c["head_dim"] or c["hidden_size"] // heads
    G = c["num_key_value_heads"] or heads
    own = replace(
        s,
        hidden_size=c["hidden_size"],
        num_heads=heads,
        attention=AttentionParams(D**-0.5),
        caches=(*s.caches, FullAttentionSpec(G, D, D)),
    )
    layer = w.scope(next((p for p in LAYER_PREFIXES if f"{p}hidden_norm.weight" in w), LAYER_PREFIXES[0]))
    eps = c["rms_norm_eps"]
    features = Buffer("states between layers", len(layers) * s.hidden_size)
    tensors = llama_like.OptionalTensors(qkv_bias=c["attention_bias"], qk_norm=c["model_type"] == "qwen3")
    rope = get_whole_head_rope(D, c)
    lm_head = load_linear(w, "lm_head", bias=False)
    head = Eagle3Head(
        features=features,
        feature_norm=load_norm(w, "input_norm", eps) if c["norm_before_fc"] else None,
        fc=load_linear(w, "fc", bias=False),
        embedding=load_embedding(w, decoder.token_embedding),
        input_norm=load_norm(layer, "input_layernorm", eps),
        hidden_norm=load_norm(layer, "hidden_norm", eps),
        attention=llama_like.build_attention(layer.scope("self_attn."), len(s.caches), own, rope, tensors),
        mlp_norm=load_norm(layer, "post_attention_layernorm", eps),
        mlp=llama_like.load_mlp(layer.scope("mlp.")),
        norm=load_norm(w, "norm", eps),
        lm_head=lm_head,
        restrict=load_restriction(w, s.vocab_size, lm_head.weight.shape[0]),
        normalizes_first=c["norm_before_residual"],
        passes_normed=c["norm_output"],
    )

    def load_layer(i: int) -> DecoderLayer:
        places = [place for place, number in enumerate(layers) if number == i]
        return TappedLayer(decoder.load_layer(i), features, places) if places else decoder.load_layer(i)

    caches = (*s.caches, DraftHeadSpec(G, D, D))
    num_layers = s.num_layers if decoder.num_layers is None else decoder.num_layers
    return replace(decoder, spec=replace(s, caches=caches), load_layer=load_layer, num_layers=num_layers), head


def load_embedding(w: Weights, target: Embedding) -> Embedding:
    """Load the head's own embedding of tokens, or share the target's where it has none."""
    name = next((n for n in ("embed_tokens.weight", "model.embed_tokens.weight") if n in w), None)
    return target if name is None else Embedding(w.load_matrix(name, embedding=True))


def load_restriction(w: Weights, vocab_size: int, num_known: int) -> Restrict | None:
    """Return what gives the logits of the tokens that a head knows to all tokens; None where it knows all.

    The file has the distance of each token's number in the target. Raises ValueError for numbers that are none.
    """
    if "d2t" not in w:
        if num_known != vocab_size:
            raise ValueError(f"the head knows {num_known} tokens of {vocab_size}, and no d2t says which")
        return None
    distances = w.checkpoint.read(w.full_name("d2t")).long().clone()  # the file may be closed
    tokens = distances + torch.arange(len(distances))
    are_tokens = bool(((tokens >= 0) & (tokens < vocab_size)).all())
    if len(tokens) != num_known or not are_tokens or len(set(tokens.tolist())) < num_known:
        raise ValueError(f"d2t does not name {num_known} of {vocab_size} tokens")
    return partial(spread, tokens, vocab_size)


def spread(tokens: Tensor, vocab_size: int, logits: Tensor, _: Tensor) -> Tensor:
    """Return logits [N, V] of these tokens [n], by their logits [N, n]; -inf for others."""
    found = torch.full((len(logits), vocab_size), -torch.inf, device=logits.device)
    found[:, tokens.to(logits.device)] = logits
    return found
