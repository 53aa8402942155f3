"""GPT-J: attention and MLP side by side behind one norm, the first numbers of a head turned in neighbouring pairs.

Wang and Komatsuzaki, 2021: github.com/kingoflolz/mesh-transformer-jax.
"""

from __future__ import annotations

from typing import Any

from retain.models.decoder import Attention, Decoder, ModelSpec, ParallelLayer, multi_head_spec, scope_base_model
from retain.models.layers import MLP, Embedding, load_layer_norm, load_linear, load_lm_head
from retain.models.rope import Rope, get_rope
from retain.models.weights import Weights


def spec_from_config(c: dict[str, Any]) -> ModelSpec:
    """From config.json."""
    return multi_head_spec(c["vocab_size"], c["n_embd"], c["n_head"], c["n_layer"], c["n_positions"])


def build_layer(w: Weights, i: int, s: ModelSpec, rope: Rope) -> ParallelLayer:
    """One layer, of the weights below h.<i>."""
    qkv, out = load_linear(w, "attn.q_proj", "attn.k_proj", "attn.v_proj"), load_linear(w, "attn.out_proj")
    mlp = MLP(
        load_linear(w, "mlp.fc_in"), load_linear(w, "mlp.fc_out"), w.config.get("activation_function", "gelu_new")
    )
    return ParallelLayer(
        load_layer_norm(w, "ln_1", w.config["layer_norm_epsilon"]), Attention(i, s, qkv, out, rope), None, mlp
    )


def build(w: Weights) -> Decoder:
    """The decoder from weights in Hugging Face's names."""
    c, s = w.config, spec_from_config(w.config)
    turn = get_rope(c["rotary_dim"], {"rope_theta": 10000.0, "rope_type": "default"}, interleaved=True)
    m = scope_base_model(w, "wte.weight", "transformer.", "")
    embed = Embedding(m.load_matrix("wte.weight", embedding=True), dtype=m.dtype)
    norm = load_layer_norm(m, "ln_f", c["layer_norm_epsilon"])
    output = load_lm_head(w, "lm_head", embed.table, c.get("tie_word_embeddings", False))
    return Decoder(s, embed, lambda i: build_layer(m.scope(f"h.{i}."), i, s, turn), norm, output, [turn])
