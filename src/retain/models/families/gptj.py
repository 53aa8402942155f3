"""GPT-J: attention and MLP side by side behind one norm, the first numbers of a head turned in neighbouring pairs.

Wang and Komatsuzaki, 2021: github.com/kingoflolz/mesh-transformer-jax.
"""

from __future__ import annotations

from typing import Any

from retain.models.decoder import Attention, Decoder, Parallel, Spec, below, multi_head
from retain.models.parts import MLP, Embedding, head, layer_norm, linear
from retain.models.rope import Rope, rope
from retain.models.weights import Weights


def spec(c: dict[str, Any]) -> Spec:
    """From config.json."""
    return multi_head(c["vocab_size"], c["n_embd"], c["n_head"], c["n_layer"], c["n_positions"])


def layer(w: Weights, i: int, s: Spec, turn: Rope) -> Parallel:
    """One layer, of the weights below h.<i>."""
    qkv, out = linear(w, "attn.q_proj", "attn.k_proj", "attn.v_proj"), linear(w, "attn.out_proj")
    mlp = MLP(linear(w, "mlp.fc_in"), linear(w, "mlp.fc_out"), w.config.get("activation_function", "gelu_new"))
    return Parallel(layer_norm(w, "ln_1", w.config["layer_norm_epsilon"]), Attention(i, s, qkv, out, turn), None, mlp)


def build(w: Weights) -> Decoder:
    """The decoder from weights in Hugging Face's names."""
    c, s = w.config, spec(w.config)
    turn = rope(c["rotary_dim"], {"rope_theta": 10000.0, "rope_type": "default"}, pairs=True)
    m = below(w, "wte.weight", "transformer.", "")
    embed = Embedding(m.matrix("wte.weight", embedding=True), dtype=m.dtype)
    norm = layer_norm(m, "ln_f", c["layer_norm_epsilon"])
    output = head(w, "lm_head", embed.table, c.get("tie_word_embeddings", False))
    return Decoder(s, embed, lambda i: layer(m.at(f"h.{i}."), i, s, turn), norm, output, [turn])
