"""Gemma 4, text: five sliding layers to a full one, whose heads are larger and fewer, and whose values may be its keys.

The E series adds embeddings of its own to each layer, and its last layers read the cache of earlier ones. Others have
experts beside the MLP. Norms multiply by w; heads of v are normalized, too; scores are not scaled.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from retain.files import quote
from retain.kernels import ops
from retain.kernels.attention_params import AttentionParams
from retain.kernels.experts import Experts, Router
from retain.kernels.ops import Buffer, Operation
from retain.kernels.rope import Rope
from retain.kernels.slots.kv_cache_spec import FullAttentionSpec, LayerCacheSpec, SharedCacheSpec, SlidingWindowSpec
from retain.kernels.weights.weight import Weight
from retain.models.decoder import Attention, Decoder, ModelSpec, SandwichNormLayer, load_ends
from retain.models.experts import load_experts, load_gate
from retain.models.family_config import add_defaults, get_alternating_types
from retain.models.layers import (
    CappedHead,
    Embedding,
    Linear,
    RMSNorm,
    load_linear,
    load_norm,
    resolve_activation,
)
from retain.models.llama_like import load_mlp, make_spec
from retain.models.rope import complete_rope_parameters, get_rope
from retain.models.weights import Weights

DEFAULTS: Mapping[str, Any] = {  # of transformers
    "vocab_size": 262144,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 30,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "global_head_dim": 512,  # of full layers
    "num_global_key_value_heads": None,  # num_key_value_heads
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-6,
    "sliding_window": 512,
    "final_logit_softcapping": None,
    "hidden_size_per_layer_input": 256,
    "vocab_size_per_layer_input": 262144,
    "attention_k_eq_v": False,
    "num_kv_shared_layers": 0,
    "use_double_wide_mlp": False,
    "enable_moe_block": False,
    "num_experts": None,
    "top_k_experts": None,
    "attention_bias": False,
    "tie_word_embeddings": True,
    "use_bidirectional_attention": None,
}
ROPE_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1000000.0},
}
NORMS_OF_EXPERTS = (("post_feedforward", 1), ("pre_feedforward", 2), ("post_feedforward", 2))
READS_PER_LAYER_CONFIG = True
MAX_SIZE = 2**16
PATTERN = 6  # a full layer in so many
IGNORED_TENSORS = (r"layers\.\d+\.self_attn\.[kv]_(proj|norm)\.weight",)  # of layers that read another one's cache


def read_layer_types(c: Mapping[str, Any]) -> list[str]:
    """Return the type of each layer. The last one is full."""
    types = get_alternating_types(c, PATTERN)
    return [*types[:-1], "full_attention"]


def get_full_sizes(c: Mapping[str, Any]) -> tuple[int, int]:
    """Return the kv heads and the head dim of full layers.

    Published configs name them; those that transformers 5 has written list them for each such layer. Raises ValueError.
    """
    listed = c.get("per_layer_config")
    if listed is None:
        own_heads = c["num_global_key_value_heads"] if c["attention_k_eq_v"] else None
        return own_heads or c["num_key_value_heads"], c["global_head_dim"]
    full = [listed.get(str(i), {}) for i, t in enumerate(read_layer_types(c)) if t == "full_attention"]
    pairs = {(x.get("num_key_value_heads", c["num_key_value_heads"]), x.get("head_dim", c["head_dim"])) for x in full}
    known = {"num_key_value_heads", "head_dim"}
    sizes = pairs.pop()
    if pairs or len(listed) > len(full) or any(x.keys() - known for x in full):
        raise ValueError(f"per_layer_config {quote(listed)} is not supported: full layers must be alike")
    if not all(type(x) is int and 0 < x <= MAX_SIZE for x in sizes):
        raise ValueError(f"per_layer_config {quote(listed)} has sizes that are not from 1 to {MAX_SIZE}")
    return sizes


def layer_specs(c: Mapping[str, Any]) -> tuple[LayerCacheSpec, ...]:
    """Return what each layer caches. Raises ValueError where a shared layer has none of its type before it."""
    types = read_layer_types(c)
    G = c["num_key_value_heads"]
    D = c["head_dim"]
    full_G, full_D = get_full_sizes(c)
    kinds: Mapping[str, LayerCacheSpec] = {
        "sliding_attention": SlidingWindowSpec(G, D, D, c["sliding_window"]),
        "full_attention": FullAttentionSpec(full_G, full_D, full_D),
    }
    num_own = len(types) - c["num_kv_shared_layers"]
    if missing := set(types) - set(types[:num_own]):
        raise ValueError(f"num_kv_shared_layers leaves no layer of the type {sorted(missing)[0]} a cache of its own")
    last = {layer_type: i for i, layer_type in enumerate(types[:num_own])}
    return tuple(kinds[t] if i < num_own else SharedCacheSpec(last[t]) for i, t in enumerate(types))


def spec_from_config(c: Mapping[str, Any]) -> ModelSpec:
    """Read the spec from config.json."""
    c = add_defaults(c, DEFAULTS)
    return replace(make_spec(c), caches=layer_specs(c), attention=AttentionParams(scale=1.0))


@dataclass(frozen=True, eq=False, kw_only=True)
class PerLayerEmbedding(Embedding):
    """An embedding that fills a buffer for all layers, too: a table's rows and a projection of the embedding itself."""

    inputs_table: Weight  # [V, L P]
    inputs_scale: float
    inputs_projection: Linear  # [L P, E]
    inputs_norm: RMSNorm  # [L, P]

    def emit(self, out: Buffer) -> Iterator[Operation]:
        """Yield the operations of the layer, which fills buffer `out` for the ids and positions of a step."""
        yield from super().emit(out)
        width = self.inputs_table.shape[1]
        projected = Buffer("projected layer inputs", width)
        inputs = Buffer("layer inputs", width)
        yield from self.inputs_projection.emit(out, projected)
        yield ops.Embed(inputs, self.inputs_table, self.inputs_scale)
        yield from self.inputs_norm.emit(projected, inputs, add=True)


@dataclass(frozen=True, eq=False)
class PerLayerInput:
    """Compute x += norm(projection(act(gate(x)) * the layer's part of the layer inputs))."""

    gate: Linear  # [P, E]
    projection: Linear  # [E, P]
    norm: RMSNorm
    act: str
    layer_idx: int
    num_layers: int

    def emit(self, x: Buffer, scratch: Buffer) -> Iterator[Operation]:
        """Yield the operations of the layer, which updates buffer `x` in place."""
        size = self.gate.weight.shape[0]
        gate = Buffer("layer gate", size)
        inputs = Buffer("layer inputs", self.num_layers * size)
        yield from self.gate.emit(x, gate)
        yield ops.Activate(gate, gate, self.act)
        yield ops.Multiply(gate, inputs, self.layer_idx * size)
        yield from self.projection.emit(gate, scratch)
        yield from self.norm.emit(scratch, x, add=True)


@dataclass(frozen=True, eq=False)
class ParallelExperts:
    """Compute y = norm1(y) + norm3(experts(norm2(x))), beside an MLP whose output is y."""

    router_norm: RMSNorm
    gate: Linear  # [n, E]: the scores
    norm1: RMSNorm
    norm2: RMSNorm
    norm3: RMSNorm
    experts: Experts

    def emit(self, x: Buffer, y: Buffer, h: Buffer) -> Iterator[Operation]:
        """Yield the operations of the layer, which updates buffer `y` in place, and uses `h`."""
        n = self.experts.num_experts
        scores = Buffer(f"scores {n}", n)
        mixed = Buffer("mixed", self.experts.hidden_size)
        yield from self.norm1.emit(y, y)
        yield from self.router_norm.emit(x, h)
        yield from self.gate.emit(h, scores)
        yield from self.norm2.emit(x, h)
        yield ops.MixExperts(h, scores, mixed, self.experts)
        yield from self.norm3.emit(mixed, y, add=True)


@dataclass(frozen=True, eq=False)
class Gemma4Layer(SandwichNormLayer):
    """Norms before and after both branches, then what the layer has of its own, then all times a number."""

    experts: ParallelExperts | None
    layer_input: PerLayerInput | None
    scalar: float

    def emit(self, x: Buffer) -> Iterator[Operation]:
        """Yield the operations of the layer, which updates buffer `x` in place."""
        E = self.attention.spec.hidden_size
        yield from super().emit(x)
        if self.layer_input:
            yield from self.layer_input.emit(x, Buffer("y", E))
        if self.scalar != 1:
            yield ops.Scale(x, torch.full((E,), self.scalar))

    def emit_mlp(self, x: Buffer, h: Buffer, y: Buffer) -> Iterator[Operation]:
        """Yield the operations of the MLP, and of the experts beside it."""
        yield from super().emit_mlp(x, h, y)
        if self.experts:
            yield from self.experts.emit(x, y, h)


def build_attention(w: Weights, i: int, s: ModelSpec, rope: Rope, keys_are_values: bool) -> Attention:
    """Build the attention of one layer. One that reads another's cache has queries alone."""
    c = w.config
    a = s.kv_cache.attention(i)
    heads = s.num_heads + a.num_kv_heads
    q_norm = w["q_norm.weight"].float().expand(s.num_heads, -1)
    o_proj = load_linear(w, "o_proj", bias=c["attention_bias"])
    if isinstance(s.caches[i], SharedCacheSpec):
        qkv = load_linear(w, "q_proj", bias=c["attention_bias"])
        return Attention(i, s, qkv, o_proj, rope, RMSNorm(q_norm, c["rms_norm_eps"]))
    names = ("q_proj", "k_proj", "k_proj" if keys_are_values else "v_proj")
    k_norm = w["k_norm.weight"].float().expand(a.num_kv_heads, -1)
    qk_norm = RMSNorm(torch.cat((q_norm, k_norm)), c["rms_norm_eps"])
    v_norm = RMSNorm(torch.ones(a.num_kv_heads, a.v_dim), c["rms_norm_eps"], first=heads * a.k_dim)
    return Attention(i, s, load_linear(w, *names, bias=c["attention_bias"]), o_proj, rope, qk_norm, v_norm=v_norm)


def load_parallel_experts(w: Weights) -> ParallelExperts:
    """Load the experts of a layer, and their router. The router's norm takes the scale of its input."""
    c = w.config
    eps = c["rms_norm_eps"]
    scale = w["router.scale"].float() * c["hidden_size"] ** -0.5
    router = Router(c["top_k_experts"], expert_scale=w["router.per_expert_scale"].float())
    norm1, norm2, norm3 = (load_norm(w, f"{name}_layernorm_{i}", eps) for name, i in NORMS_OF_EXPERTS)
    experts = load_experts(w, c["num_experts"], router, c["hidden_activation"])
    return ParallelExperts(RMSNorm(scale, eps), load_gate(w, "router.proj"), norm1, norm2, norm3, experts)


def load_layer_input(w: Weights, i: int) -> PerLayerInput:
    """Load what the inputs of layer i pass through."""
    gate, projection = (load_linear(w, n, bias=False) for n in ("per_layer_input_gate", "per_layer_projection"))
    act = resolve_activation(w.config["hidden_activation"])
    norm = load_norm(w, "post_per_layer_input_norm", w.config["rms_norm_eps"])
    return PerLayerInput(gate, projection, norm, act, i, w.config["num_hidden_layers"])


def build_layer(w: Weights, i: int, s: ModelSpec, rope: Rope, cache: int | None = None) -> Gemma4Layer:
    """Build one layer from the weights in layers.<i>. It has the cache of that number, or of another one."""
    c = w.config
    is_full = read_layer_types(c)[i] == "full_attention"
    eps = c["rms_norm_eps"]
    attention = w.scope("self_attn.")
    return Gemma4Layer(
        load_norm(w, "input_layernorm", eps),
        build_attention(attention, i if cache is None else cache, s, rope, is_full and c["attention_k_eq_v"]),
        load_norm(w, "post_attention_layernorm", eps),
        load_norm(w, "pre_feedforward_layernorm", eps),
        load_mlp(w.scope("mlp."), act_key="hidden_activation"),
        load_norm(w, "post_feedforward_layernorm", eps),
        load_parallel_experts(w) if c["enable_moe_block"] else None,
        load_layer_input(w, i) if c["hidden_size_per_layer_input"] else None,
        float(w["layer_scalar"]),
    )


def load_embedding(m: Weights, table: Weight) -> Embedding:
    """Return the token embedding, with the one that all layers read if the model has it."""
    c = m.config
    # Rounded to dtype as in training.
    scale = torch.tensor(c["hidden_size"] ** 0.5, dtype=m.dtype).item()
    size = c["hidden_size_per_layer_input"]
    if not size:
        return Embedding(table, scale)
    inputs_table = m.load_matrix("embed_tokens_per_layer.weight", embedding=True)
    norm = m["per_layer_projection_norm.weight"].float()
    expected = (c["vocab_size"], c["num_hidden_layers"] * size)
    if tuple(inputs_table.shape) != expected or norm.shape != (size,):
        raise ValueError(f"the inputs of layers have the shape {list(inputs_table.shape)}, not {list(expected)}")
    half = 2.0**-0.5  # of the table's rows and of the projection
    eps = c["rms_norm_eps"] * c["hidden_size"]  # the projection is divided by the root of E, which a norm undoes
    return PerLayerEmbedding(
        table,
        scale,
        inputs_table=inputs_table,
        inputs_scale=size**0.5 * half,
        inputs_projection=load_linear(m, "per_layer_model_projection", bias=False),
        inputs_norm=RMSNorm((norm * half).expand(c["num_hidden_layers"], -1), eps),
    )


def get_ropes(c: Mapping[str, Any]) -> dict[str, Rope]:
    """Return the Rope of each type of layers."""
    given = c.get("rope_parameters") or ROPE_DEFAULTS
    dims = {"sliding_attention": c["head_dim"], "full_attention": get_full_sizes(c)[1]}
    return {
        t: get_rope(dim, complete_rope_parameters({**ROPE_DEFAULTS[t], **(given.get(t) or {})}, c))
        for t, dim in dims.items()
    }


def build(w: Weights) -> Decoder:
    """Build the decoder from weights with Hugging Face's names. A file with vision has one of two other prefixes."""
    w = w.with_defaults(DEFAULTS)
    c = w.config
    if c["use_bidirectional_attention"] == "all":
        raise ValueError("a model with use_bidirectional_attention='all' is not supported")
    s = spec_from_config(c)
    layer_types = read_layer_types(c)
    ropes = get_ropes(c)
    m, table, head = load_ends(w, "model.", "model.language_model.", "language_model.model.", "")
    cap = c["final_logit_softcapping"]

    def load_layer(i: int) -> Gemma4Layer:
        return build_layer(m.scope(f"layers.{i}."), i, s, ropes[layer_types[i]])

    norm = load_norm(m, "norm", c["rms_norm_eps"])
    output = CappedHead(head, float(cap)) if cap else head
    return Decoder(s, load_embedding(m, table), load_layer, norm, output, list(ropes.values()))
