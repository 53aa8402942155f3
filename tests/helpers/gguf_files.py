"""Write GGUF files as llama.cpp's converter does, with the names and the writer of the `gguf` library.

    write_gguf(path, tiny_checkpoint("llama"))     a whole model in float32
    write_gguf(path, checkpoint, ggml_type="Q8_0", vocabulary=BYTE_LEVEL_VOCABULARY)

The converter's changes to tensors are implemented here independently, after llama.cpp's convert_hf_to_gguf.py.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from numpy.typing import NDArray

from retain.processing.detokenizer import unicode_to_bytes
from tests.helpers.gguf_dense import (
    DENSE_ARCHS,
    PERMUTED,
    dense_metadata,
    longrope_tensors,
    permute_rows,
    qk_norm_tensors,
    scaling_metadata,
)
from tests.helpers.gguf_hybrids import (
    EXACT,
    NO_LEAF,
    STORABLE,
    convert_hybrid_tensors,
    extra_tensors,
    hybrid_metadata,
    split_halves,
    split_qkvz,
)
from tests.helpers.gguf_latent import LATENT_ARCHS, split_kv_b
from tests.helpers.gguf_mamba2 import MAMBA2_ARCHS, choose_arch, split_mamba2_stacks
from tests.helpers.tiny_models import CONFIGS, TinyCheckpoint, tiny_checkpoint

FLOAT_TYPES = [t for t in GGMLQuantizationType if t.name not in ("I8", "I16", "I32", "I64", "F64")]
GGUF_ARCHS = {
    "llama": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3moe",
    "gpt_oss": "gpt-oss",
    "gemma3_text": "gemma3",
    "gemma4_text": "gemma4",
    "qwen3_next": "qwen3next",
    "qwen3_5_text": "qwen35",
    "qwen3_5_moe_text": "qwen35moe",
    "lfm2": "lfm2",
    "lfm2_moe": "lfm2moe",
    "gpt2": "gpt2",
    "gpt_neox": "gptneox",
    "mpt": "mpt",
    **DENSE_ARCHS,
    **LATENT_ARCHS,
    **MAMBA2_ARCHS,
}
GPT_OSS_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "original_max_position_embeddings": 4096,
}
TEXT_MODELS = {*DENSE_ARCHS.values(), *LATENT_ARCHS.values(), *MAMBA2_ARCHS.values(), "nemotron_h"}
CENTERED_NORMS = {"gemma3": "norm.weight", "muse-glimmer": "layernorm.weight"}  # they multiply by 1 + w
BYTE_TO_CHAR = {b: c for c, b in unicode_to_bytes().items()}
# 128 tokens: 110 single bytes, 15 merges, and three control tokens.
MERGES = [
    "h e",
    "l l",
    "he ll",
    "hell o",
    "Ġ w",
    "o r",
    "Ġw or",
    "l d",
    "Ġwor ld",
    "e r",
    "Ġ Ġ",
    "t h",
    "th e",
    "a n",
    "i n",
]
BYTE_LEVEL_TOKENS = (
    [BYTE_TO_CHAR[b] for b in range(10, 120)] + [m.replace(" ", "") for m in MERGES] + ["<|a|>", "<|b|>", "<|c|>"]
)
BYTE_LEVEL_VOCABULARY: dict[str, Any] = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "gpt-2",
    "tokenizer.ggml.tokens": BYTE_LEVEL_TOKENS,
    "tokenizer.ggml.token_type": [1] * 125 + [3] * 3,
    "tokenizer.ggml.merges": MERGES,
    "tokenizer.ggml.bos_token_id": 125,
    "tokenizer.ggml.eos_token_id": 126,
}
SENTENCEPIECE_PIECES = ["▁the", "▁cat", "ca", "▁s", "at", "th", "the", "▁t", "▁c", "▁the▁cat", "he", "▁sat", "▁▁"]
SENTENCEPIECE_TOKENS = [
    "<unk>",
    "<s>",
    "</s>",
    *(f"<0x{b:02X}>" for b in range(256)),
    "<tag>",
    *SENTENCEPIECE_PIECES,
    *"▁thecasox.,é",
]
SENTENCEPIECE_VOCABULARY: dict[str, Any] = {
    "tokenizer.ggml.model": "llama",
    "tokenizer.ggml.tokens": SENTENCEPIECE_TOKENS,
    "tokenizer.ggml.scores": [0.0] * 260 + [-float(i) for i in range(len(SENTENCEPIECE_TOKENS) - 260)],
    "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [4] + [1] * (len(SENTENCEPIECE_TOKENS) - 260),
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
    "tokenizer.ggml.unknown_token_id": 0,
}


def tiny_for_gguf(model_type: str, **changes: Any) -> TinyCheckpoint:
    """Create a tiny checkpoint without the options that a GGUF file of its architecture cannot store."""
    if model_type in STORABLE:
        return tiny_checkpoint(model_type, **{**STORABLE[model_type], **changes})
    assert not changes, model_type
    if model_type == "gemma3_text":  # files store no other pattern
        return tiny_checkpoint(model_type, sliding_window_pattern=6, num_hidden_layers=7, query_pre_attn_scalar=16)
    if model_type == "qwen3_moe":  # llama.cpp normalizes weights
        return tiny_checkpoint(model_type, norm_topk_prob=True)
    if model_type == "qwen2":
        return tiny_checkpoint(model_type, use_sliding_window=False)
    if model_type in ("granite", "granitemoe", "granitemoeshared"):  # float32 in a file
        return tiny_checkpoint(model_type, attention_multiplier=0.25)
    if model_type == "muse_glimmer_text":
        return tiny_checkpoint(model_type, qk_scale_factor=3.875)
    if model_type == "ministral3":  # the converter requires the scales of YaRN
        rope = CONFIGS[model_type]["rope_parameters"]
        return tiny_checkpoint(model_type, rope_parameters={**rope, "mscale": 1.0, "mscale_all_dim": 1.0})
    return tiny_checkpoint(model_type)


def write_gguf(
    path: Path,
    checkpoint: TinyCheckpoint,
    ggml_type: str | Sequence[str] = "F32",
    vocabulary: dict[str, Any] | None = None,
    extra: dict[str, Any] | None = None,
    tensors: Mapping[str, NDArray[Any] | tuple[NDArray[Any], GGMLQuantizationType] | None] | None = None,
    split_max_tensors: int = 0,
    named: str = "",
) -> Path:
    """Write a checkpoint with matrices of `ggml_type`, or of several types in turn.

    `extra` and `tensors` replace what there is; None removes it, and blocks come with their type. In parts of
    `split_max_tensors`, where it is not 0. `named`: the architecture that the file says, in place of the checkpoint's.
    """
    arch, keys = list_metadata(checkpoint)
    meta = {f"{named or arch}.{key}": value for key, value in keys.items()} | {**(vocabulary or {}), **(extra or {})}
    others = {**extra_tensors(arch, checkpoint.config), **longrope_tensors(checkpoint.config)}
    others |= {**qk_norm_tensors(arch, checkpoint.config), **(tensors or {})}
    types = cycle([ggml_type] if isinstance(ggml_type, str) else ggml_type)
    w = GGUFWriter(path, named or arch, split_max_tensors=split_max_tensors)
    for key, value in meta.items():
        if value is not None:
            add_metadata(w, key, value)
    known = {"muse-glimmer": "afmoe"}.get(arch, arch)  # which the library does not have, of the same names
    names = gguf.get_tensor_name_map(next(a for a, n in gguf.MODEL_ARCH_NAMES.items() if n == known), 100)
    converted = {n: convert_tensor(arch, n, checkpoint.read(n), checkpoint.config) for n in checkpoint.names()}
    converted = split_stacks(converted) if arch == "gpt-oss" else converted
    converted = convert_hybrid_tensors(arch, converted, checkpoint.config)
    for name, x in sorted(stack_experts(converted).items()):
        stem, _, leaf = (name, "", "weight") if name.endswith(".sinks") else name.rpartition(".")
        gguf_stem = stem if stem.startswith("blk.") else names.get_name(stem)
        assert gguf_stem, name
        is_exact = x.ndim == 1 or leaf == "bias" or gguf_stem.endswith(EXACT)
        tensor_type = GGMLQuantizationType.F32 if is_exact else GGMLQuantizationType[next(types)]
        gguf_name = f"{gguf_stem}.{leaf}".removesuffix(NO_LEAF)
        if gguf_name in others:
            continue
        w.add_tensor(gguf_name, gguf.quants.quantize(x, tensor_type), raw_dtype=tensor_type)
    for name, values in others.items():
        if isinstance(values, tuple):
            w.add_tensor(name, values[0], raw_dtype=values[1])
        elif values is not None:
            w.add_tensor(name, values)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    return path


def list_metadata(checkpoint: TinyCheckpoint) -> tuple[str, dict[str, Any]]:
    """Return the architecture of a checkpoint, and its metadata by keys that lack it."""
    c = checkpoint.config
    arch = choose_arch(c) or GGUF_ARCHS[c["model_type"]]
    meta = config_to_metadata(arch, c) | hybrid_metadata(arch, c)
    return arch, {key.removeprefix(f"{arch}."): value for key, value in meta.items() if value is not None}


def list_tensors(checkpoint: TinyCheckpoint) -> dict[str, NDArray[np.float32]]:
    """Return the tensors of a checkpoint by the names that they have when they are read from a GGUF file."""
    tensors = {name: checkpoint.read(name).numpy() for name in checkpoint.names()}
    if checkpoint.config["model_type"] == "gpt_oss":
        return split_stacks(tensors)
    for name in [n for n in tensors if n.endswith("in_proj_qkvz.weight")]:
        qkv_and_z = split_qkvz(tensors.pop(name), checkpoint.config)
        tensors |= {name.replace("qkvz", part): x for part, x in zip(("qkv", "z"), qkv_and_z, strict=True)}
    return split_halves(split_mamba2_stacks(split_kv_b(tensors, checkpoint.config)))


def split_stacks(tensors: dict[str, NDArray[np.float32]]) -> dict[str, NDArray[np.float32]]:
    """Name the experts of gpt-oss one by one: gates and up projections apart, matrices [out, in]."""
    found = {}
    for name, x in tensors.items():
        prefix, is_stack, rest = name.partition(".experts.")
        if not is_stack or rest[0].isdigit():
            found[name] = x
            continue
        leaf = "bias" if rest.endswith("_bias") else "weight"
        parts = {"gate_proj": x[..., ::2], "up_proj": x[..., 1::2]} if "gate_up" in rest else {"down_proj": x}
        for part, stack in parts.items():
            for e, own in enumerate(stack):
                found[f"{prefix}.experts.{e}.{part}.{leaf}"] = np.ascontiguousarray(own.T)
    return found


def stack_experts(tensors: dict[str, NDArray[np.float32]]) -> dict[str, NDArray[np.float32]]:
    """Stack the matrices of all experts of a layer: [n, out, in]."""
    stacks: dict[str, dict[int, NDArray[np.float32]]] = {}
    for name in list(tensors):
        if found := re.fullmatch(r"(.*\.experts)\.(\d+)\.(.*)", name):
            stacks.setdefault(f"{found[1]}.{found[3]}", {})[int(found[2])] = tensors.pop(name)
    return tensors | {name: np.stack([parts[e] for e in sorted(parts)]) for name, parts in stacks.items()}


def add_metadata(w: GGUFWriter, key: str, value: Any) -> None:
    """Write one metadata pair, of the type that llama.cpp's converter uses."""
    if isinstance(value, bool):
        w.add_bool(key, value)
    elif isinstance(value, int):
        w.add_uint32(key, value)
    elif isinstance(value, float):
        w.add_float32(key, value)
    elif isinstance(value, str):
        w.add_string(key, value)
    else:
        w.add_array(key, value)


def config_to_metadata(arch: str, c: dict[str, Any]) -> dict[str, Any]:
    """Convert config.json to metadata."""
    if arch in TEXT_MODELS:
        return {f"{arch}.{key}": value for key, value in dense_metadata(arch, c).items()}
    hidden = c.get("hidden_size") or c.get("n_embd") or c["d_model"]
    heads = c.get("num_attention_heads") or c.get("n_head") or c["n_heads"]
    values = {
        "block_count": c.get("num_hidden_layers") or c.get("n_layer") or c["n_layers"],
        "context_length": c.get("max_position_embeddings") or c.get("n_positions") or c["max_seq_len"],
        "embedding_length": hidden,
        "feed_forward_length": c.get("intermediate_size") or 4 * hidden,
        "attention.head_count": heads,
    }
    if arch in ("qwen3moe", "gpt-oss"):
        values |= {
            "expert_count": c.get("num_experts") or c["num_local_experts"],
            "expert_used_count": c["num_experts_per_tok"],
            "expert_feed_forward_length": c.get("moe_intermediate_size") or c["intermediate_size"],
        }
    if arch in ("llama", "qwen2", "qwen3", "qwen3moe", "gpt-oss", "gemma3"):
        values |= {
            "attention.head_count_kv": c["num_key_value_heads"],
            "attention.layer_norm_rms_epsilon": c["rms_norm_eps"],
            "attention.key_length": c["head_dim"],
            "attention.value_length": c["head_dim"],
            "rope.freq_base": c["rope_theta"],
        }
    else:
        values["attention.layer_norm_epsilon"] = 1e-5
    if arch in ("gemma3", "gpt-oss"):
        values["attention.sliding_window"] = c["sliding_window"]
    if arch == "gpt-oss":  # a config without scaling has that of its class, which the converter writes down
        values |= scaling_metadata(c.get("rope_scaling") or GPT_OSS_ROPE)
    if arch == "gemma3":
        values["rope.freq_base_swa"] = c["rope_local_base_freq"]
    if arch == "gptneox":
        values["rope.dimension_count"] = int(c["rotary_pct"] * hidden // heads)
        values["use_parallel_residual"] = c.get("use_parallel_residual", True)
    if arch == "mpt":
        values["attention.max_alibi_bias"] = 8.0
    return {f"{arch}.{key}": value for key, value in values.items() if value is not None}


def convert_tensor(arch: str, name: str, x: torch.Tensor, c: dict[str, Any]) -> NDArray[np.float32]:
    """Convert a tensor to llama.cpp's layout."""
    a = x.float().numpy()
    if arch in PERMUTED:
        a = permute_rows(name, a, c)
    if name.endswith(CENTERED_NORMS.get(arch, " ")):
        a = a + 1
    if arch == "gpt2" and name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight")):
        a = a.T
    if arch == "gptneox" and ".query_key_value." in name:
        heads = c["num_attention_heads"]
        qkv_of_heads = a.reshape(heads, 3, c["hidden_size"] // heads, *a.shape[1:])
        a = np.concatenate([qkv_of_heads[:, i].reshape(-1, *a.shape[1:]) for i in range(3)])
    return np.ascontiguousarray(a)
