"""LFM2, and what its model with experts shares with it."""

from __future__ import annotations

from retain.formats.errors import UnsupportedError
from retain.formats.gguf.architecture import Architecture
from retain.formats.gguf.architectures import llama
from retain.formats.gguf.metadata import GGUFMetadata, HFConfig, read_kv_heads

GLOBAL_TENSORS = {
    "token_embd": "model.embed_tokens",
    "token_embd_norm": "model.embedding_norm",  # llama.cpp's name of the last norm
    "output": "lm_head",
}
LAYER_TENSORS = {
    "attn_norm": "operator_norm",
    "ffn_norm": "ffn_norm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.out_proj",
    "attn_q_norm": "self_attn.q_layernorm",
    "attn_k_norm": "self_attn.k_layernorm",
    "shortconv.in_proj": "conv.in_proj",
    "shortconv.conv": "conv.conv",
    "shortconv.out_proj": "conv.out_proj",
    "ffn_gate": "feed_forward.w1",
    "ffn_up": "feed_forward.w3",
    "ffn_down": "feed_forward.w2",
}
VALUES = {"shortconv.conv": lambda x: x.unsqueeze(1)}


def make_config(meta: GGUFMetadata, model_type: str) -> HFConfig:
    """Return the config of LFM2. Layers without kv heads have a short convolution."""
    heads = read_kv_heads(meta)
    if meta.get("attention.sliding_window", 0):
        raise UnsupportedError("an LFM2 with a sliding window, as of audio tokenizers, is not supported")
    c = llama.make_config(meta.with_values({"attention.head_count_kv": max(heads)}), model_type)
    return c | {
        "layer_types": ["full_attention" if n else "conv" for n in heads[: c["num_hidden_layers"]]],
        "norm_eps": c.pop("rms_norm_eps"),
        "conv_L_cache": meta.get_positive("shortconv.l_cache"),
        "full_attn_idxs": None,  # layer_types say it all
        "conv_bias": False,
        "block_auto_adjust_ff_dim": False,
    }


ARCHITECTURE = Architecture(
    lambda meta: make_config(meta, "lfm2"),
    GLOBAL_TENSORS,
    llama.LAYER_PREFIX,
    LAYER_TENSORS,
    biases=frozenset(),
    values=VALUES,
)
