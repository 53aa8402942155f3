"""GPT-J: attention and MLP in parallel after one norm; rope on neighbouring pairs of the first elements of a head.

Wang and Komatsuzaki, 2021: github.com/kingoflolz/mesh-transformer-jax.
"""

from __future__ import annotations

from typing import Any

from retain.models.decoder import Attention, Decoder, ModelSpec, ParallelLayer, multi_head_spec, scope_base_model
from retain.models.layers import MLP, Embedding, load_layer_norm, load_linear, load_lm_head
from retain.models.rope import Rope, get_rope
from retain.models.weights import Weights


def spec_from_config(c: dict[str, Any]) -> ModelSpec:
    """Read the spec from config.json."""
    return multi_head_spec(c["vocab_size"], c["n_embd"], c["n_head"], c["n_layer"], c["n_positions"])


def build_layer(w: Weights, i: int, s: ModelSpec, rope: Rope) -> ParallelLayer:
    """Build one layer from the weights in h.<i>."""
    qkv, out = load_linear(w, "attn.q_proj", "attn.k_proj", "attn.v_proj"), load_linear(w, "attn.out_proj")
    mlp = MLP(
        load_linear(w, "mlp.fc_in"), load_linear(w, "mlp.fc_out"), w.config.get("activation_function", "gelu_new")
    )
    return ParallelLayer(
        load_layer_norm(w, "ln_1", w.config["layer_norm_epsilon"]), Attention(i, s, qkv, out, rope), None, mlp
    )


def build(w: Weights) -> Decoder:
    """Build the decoder from weights with Hugging Face's names."""
    c, s = w.config, spec_from_config(w.config)
    rope = get_rope(c["rotary_dim"], {"rope_theta": 10000.0, "rope_type": "default"}, interleaved=True)
    m = scope_base_model(w, "wte.weight", "transformer.", "")
    embed = Embedding(m.load_matrix("wte.weight", embedding=True), dtype=m.dtype)
    norm = load_layer_norm(m, "ln_f", c["layer_norm_epsilon"])
    output = load_lm_head(w, "lm_head", embed.table, c.get("tie_word_embeddings", False))
    return Decoder(s, embed, lambda i: build_layer(m.scope(f"h.{i}."), i, s, rope), norm, output, [rope])
