"""Models of published sizes with random weights, for timing models that are too large to ship.

`random:llama-3.1-8b` names a folder with a config.json and a byte tokenizer. RandomCheckpoint generates its weights.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Iterator, Set
from functools import cached_property
from operator import methodcaller
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

from retain.files import atomic_write, read_json_object, shorten
from retain.formats.config_limits import check_config_file

MARKER_FILE = "random.json"  # marks a folder whose weights are generated
NUM_RANDOM_VALUES = 4_194_301  # length of the values that all tensors repeat; a prime, so that no two rows are equal
HFConfig = dict[str, Any]
Shapes = Iterator[tuple[str, tuple[int, ...]]]

LLAMA_3_1_8B: HFConfig = {
    "model_type": "llama", "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
    "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "tie_word_embeddings": False,
    "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                     "original_max_position_embeddings": 8192},
}  # fmt: skip
# A scaled Qwen 3 with experts, and a dense model that reads as many weights for a token.
QWEN3_MOE: HFConfig = {
    "model_type": "qwen3_moe", "vocab_size": 32000, "hidden_size": 1024, "intermediate_size": 4096,
    "num_hidden_layers": 12, "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 128,
    "max_position_embeddings": 32768, "rms_norm_eps": 1e-6, "rope_theta": 1000000.0, "tie_word_embeddings": True,
    "num_experts": 64, "num_experts_per_tok": 8, "moe_intermediate_size": 512, "norm_topk_prob": True,
}  # fmt: skip
# A scaled Qwen 3.5: three of four layers have linear attention, whose states are 16 MiB for each request.
QWEN3_5: HFConfig = {
    "model_type": "qwen3_5_text", "vocab_size": 32000, "hidden_size": 1024, "intermediate_size": 3584,
    "num_hidden_layers": 16, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 256,
    "linear_num_key_heads": 16, "linear_num_value_heads": 16, "linear_key_head_dim": 128,
    "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "full_attention_interval": 4,
    "max_position_embeddings": 32768, "rms_norm_eps": 1e-6, "tie_word_embeddings": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000000.0, "partial_rotary_factor": 0.25},
}  # fmt: skip
# A scaled gpt-oss: every second layer sees 128 tokens.
GPT_OSS: HFConfig = {
    "model_type": "gpt_oss", "vocab_size": 32000, "hidden_size": 1024, "intermediate_size": 1024,
    "num_hidden_layers": 12, "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 64,
    "max_position_embeddings": 32768, "rms_norm_eps": 1e-5, "rope_theta": 150000.0, "tie_word_embeddings": False,
    "sliding_window": 128, "num_local_experts": 32, "num_experts_per_tok": 4,
}  # fmt: skip
CONFIGS: dict[str, HFConfig] = {
    "llama-3.1-8b": LLAMA_3_1_8B,
    "llama-3.2-1b": {
        **LLAMA_3_1_8B, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "head_dim": 64,
        "tie_word_embeddings": True,
    },
    # ALiBi does not limit the context; 65536 is that of MPT-7B-StoryWriter.
    "mpt-7b": {
        "model_type": "mpt", "vocab_size": 50432, "d_model": 4096, "n_heads": 32, "n_layers": 32, "max_seq_len": 65536,
    },
    "qwen3-moe-1.4b-a0.3b": QWEN3_MOE,
    "qwen3-0.3b": {**QWEN3_MOE, "model_type": "qwen3"},
    "qwen3.5-0.3b": QWEN3_5,
    "gpt-oss-1.3b-a0.2b": GPT_OSS,
    "tiny": {
        **LLAMA_3_1_8B, "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 2048,
        "rope_scaling": None,
    },
}  # fmt: skip


def create_folder(name: str, parent: Path) -> Path:
    """Return the folder of a model below `parent`, created on the first call. Raises ValueError for an unknown name."""
    if name not in CONFIGS:
        raise ValueError(f"no random model {name!r}: choose one of {', '.join(f'random:{n}' for n in CONFIGS)}")
    path = parent / "random" / name
    config = CONFIGS[name]
    if not (path / MARKER_FILE).is_file():
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        tokens = [*alphabet, *(f"w{i}" for i in range(len(alphabet), config["vocab_size"]))]
        tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, []))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        files = {"tokenizer.json": tokenizer.to_str(), "config.json": json.dumps(config), MARKER_FILE: "{}"}
        for file, text in files.items():
            atomic_write(path / file, methodcaller("write", text.encode()))
    return path


class RandomCheckpoint:
    """A Checkpoint that generates its tensors from their names."""

    def __init__(self, path: Path):
        self.config = read_json_object(path / "config.json")
        check_config_file(self.config, path / "config.json")
        try:
            self._shapes = dict(TENSOR_SHAPES[self.config["model_type"]](self.config))
        except (KeyError, TypeError) as e:
            raise ValueError(f"{path}: no weights can be generated: config.json: {shorten(e)}") from None

    def names(self) -> Set[str]:
        """Return the names of all tensors of the shape."""
        return self._shapes.keys()

    def read(self, name: str) -> Tensor:
        """Generate a tensor, bfloat16. Norm weights are 1; matrices keep the scale of their input."""
        shape = self._shapes[name]
        if len(shape) == 1:
            return torch.ones(shape, dtype=torch.bfloat16)
        scale = 1.0 if "embed" in name or "wte" in name else shape[-1] ** -0.5
        block = torch.roll(self._random_values * scale, zlib.crc32(name.encode()) % NUM_RANDOM_VALUES)
        n = math.prod(shape)
        return block.repeat(-(-n // NUM_RANDOM_VALUES))[:n].view(shape)

    def read_stored(self, name: str, transposed: bool = False) -> None:
        """Return None: nothing is quantized."""

    @cached_property
    def _random_values(self) -> Tensor:
        return torch.randn(NUM_RANDOM_VALUES, generator=torch.Generator().manual_seed(0)).bfloat16()


def llama_shapes(c: HFConfig) -> Shapes:
    """Yield the names and shapes of the tensors of a Llama, or of a Qwen 3 with experts or without."""
    for prefix in _layer_prefixes(c):
        yield from _attention_shapes(c, f"{prefix}self_attn.", has_qk_norms=c["model_type"].startswith("qwen3"))
        if c["model_type"] == "qwen3_moe":
            yield f"{prefix}mlp.gate.weight", (c["num_experts"], c["hidden_size"])
            for e in range(c["num_experts"]):
                yield from _mlp_shapes(c, f"{prefix}mlp.experts.{e}.", c["moe_intermediate_size"])
        else:
            yield from _mlp_shapes(c, f"{prefix}mlp.", c["intermediate_size"])
    yield from _shared_shapes(c)


def qwen3_5_shapes(c: HFConfig) -> Shapes:
    """Yield the names and shapes of the tensors of a Qwen 3.5."""
    for i, prefix in enumerate(_layer_prefixes(c)):
        if (i + 1) % c["full_attention_interval"]:
            yield from _linear_attention_shapes(c, f"{prefix}linear_attn.")
        else:
            yield from _attention_shapes(c, f"{prefix}self_attn.", has_qk_norms=True, has_gate=True)
        yield from _mlp_shapes(c, f"{prefix}mlp.", c["intermediate_size"])
    yield from _shared_shapes(c)


def gpt_oss_shapes(c: HFConfig) -> Shapes:
    """Yield the names and shapes of the tensors of a gpt-oss, whose experts are stacked."""
    E = c["hidden_size"]
    M = c["intermediate_size"]
    n = c["num_local_experts"]
    for prefix in _layer_prefixes(c):
        for name, shape in _attention_shapes(c, f"{prefix}self_attn.", has_qk_norms=False):
            yield name, shape
            yield f"{name.removesuffix('weight')}bias", shape[:1]
        yield f"{prefix}self_attn.sinks", (c["num_attention_heads"],)
        yield f"{prefix}mlp.router.weight", (n, E)
        yield f"{prefix}mlp.router.bias", (n,)
        for name, columns, rows in (("gate_up_proj", E, 2 * M), ("down_proj", M, E)):
            yield f"{prefix}mlp.experts.{name}", (n, columns, rows)
            yield f"{prefix}mlp.experts.{name}_bias", (n, rows)
    yield from _shared_shapes(c)


def _layer_prefixes(c: HFConfig) -> Iterator[str]:
    return (f"model.layers.{i}." for i in range(c["num_hidden_layers"]))


def _shared_shapes(c: HFConfig) -> Shapes:
    """Yield what all of these models have around their layers, and the norms of each layer."""
    E = c["hidden_size"]
    yield "model.embed_tokens.weight", (c["vocab_size"], E)
    yield "model.norm.weight", (E,)
    if not c["tie_word_embeddings"]:
        yield "lm_head.weight", (c["vocab_size"], E)
    for prefix in _layer_prefixes(c):
        for name in ("input_layernorm", "post_attention_layernorm"):
            yield f"{prefix}{name}.weight", (E,)


def _attention_shapes(c: HFConfig, prefix: str, has_qk_norms: bool, has_gate: bool = False) -> Shapes:
    E = c["hidden_size"]
    D = c["head_dim"]
    q = c["num_attention_heads"] * D
    kv = c["num_key_value_heads"] * D
    for name, shape in (("q", (q * (2 if has_gate else 1), E)), ("k", (kv, E)), ("v", (kv, E)), ("o", (E, q))):
        yield f"{prefix}{name}_proj.weight", shape
    for name in ("q_norm", "k_norm") if has_qk_norms else ():
        yield f"{prefix}{name}.weight", (D,)


def _mlp_shapes(c: HFConfig, prefix: str, size: int) -> Shapes:
    E = c["hidden_size"]
    for name, shape in (("gate", (size, E)), ("up", (size, E)), ("down", (E, size))):
        yield f"{prefix}{name}_proj.weight", shape


def _linear_attention_shapes(c: HFConfig, prefix: str) -> Shapes:
    E = c["hidden_size"]
    H = c["linear_num_value_heads"]
    v = H * c["linear_value_head_dim"]
    channels = 2 * c["linear_num_key_heads"] * c["linear_key_head_dim"] + v
    for name, rows in (("in_proj_qkv", channels), ("in_proj_z", v), ("in_proj_a", H), ("in_proj_b", H)):
        yield f"{prefix}{name}.weight", (rows, E)
    yield f"{prefix}conv1d.weight", (channels, 1, c["linear_conv_kernel_dim"])
    yield f"{prefix}out_proj.weight", (E, v)
    yield f"{prefix}norm.weight", (c["linear_value_head_dim"],)
    for name in ("A_log", "dt_bias"):
        yield f"{prefix}{name}", (H,)


def mpt_shapes(c: HFConfig) -> Shapes:
    """Yield the names and shapes of an MPT model's tensors."""
    E = c["d_model"]
    yield "transformer.wte.weight", (c["vocab_size"], E)
    yield "transformer.norm_f.weight", (E,)
    for i in range(c["n_layers"]):
        prefix = f"transformer.blocks.{i}."
        for name, out_dim, in_dim in (("attn.Wqkv", 3 * E, E), ("attn.out_proj", E, E)):
            yield f"{prefix}{name}.weight", (out_dim, in_dim)
        for name, out_dim, in_dim in (("ffn.up_proj", 4 * E, E), ("ffn.down_proj", E, 4 * E)):
            yield f"{prefix}{name}.weight", (out_dim, in_dim)
        for name in ("norm_1", "norm_2"):
            yield f"{prefix}{name}.weight", (E,)


TENSOR_SHAPES = {
    "llama": llama_shapes, "qwen3": llama_shapes, "qwen3_moe": llama_shapes, "qwen3_5_text": qwen3_5_shapes,
    "gpt_oss": gpt_oss_shapes, "mpt": mpt_shapes,
}  # fmt: skip
