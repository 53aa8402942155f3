"""Models of published shapes with random weights: what is too large to ship can be timed all the same.

`random:llama-3.1-8b` becomes a folder with a config.json, a tokenizer of bytes, and no weights; `Random` makes them up.
What they say means nothing. What is not known here: what families compute.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator, Set
from functools import cached_property
from operator import methodcaller
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from retain.formats.safetensors import read_json_object

MARKER_FILE = "random.json"  # a folder that has it has no weights
NUM_RANDOM_VALUES = 4_194_301  # random numbers that all tensors are made of; a prime, so that no row is like another
HFConfig = dict[str, Any]

LLAMA_3_1_8B: HFConfig = {
    "model_type": "llama", "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
    "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "tie_word_embeddings": False,
    "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                     "original_max_position_embeddings": 8192},
}  # fmt: skip
CONFIGS: dict[str, HFConfig] = {
    "llama-3.1-8b": LLAMA_3_1_8B,
    "llama-3.2-1b": {
        **LLAMA_3_1_8B, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "head_dim": 64,
        "tie_word_embeddings": True,
    },
    # MPT-7B's context is a matter of its ALiBi: its sibling for stories has 65536.
    "mpt-7b": {
        "model_type": "mpt", "vocab_size": 50432, "d_model": 4096, "n_heads": 32, "n_layers": 32, "max_seq_len": 65536,
    },
    "tiny": {
        **LLAMA_3_1_8B, "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 2048,
        "rope_scaling": None,
    },
}  # fmt: skip


def create_folder(name: str, parent: Path) -> Path:
    """The folder of a shape, made below this one if need be. Raises ValueError."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    from retain.models.resolve import atomic_write

    if name not in CONFIGS:
        raise ValueError(f"no shape {name!r}: choose one of {', '.join(f'random:{n}' for n in CONFIGS)}")
    path, config = parent / "random" / name, CONFIGS[name]
    if not (path / MARKER_FILE).is_file():
        bytes_ = sorted(pre_tokenizers.ByteLevel.alphabet())
        words = [*bytes_, *(f"w{i}" for i in range(len(bytes_), config["vocab_size"]))]
        core = Tokenizer(models.BPE({w: i for i, w in enumerate(words)}, []))
        core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        core.decoder = decoders.ByteLevel()
        for file, text in (("tokenizer.json", core.to_str()), ("config.json", json.dumps(config)), (MARKER_FILE, "{}")):
            atomic_write(path / file, methodcaller("write", text.encode()))
    return path


class RandomCheckpoint:
    """A Source (models/weights.py) of such a folder."""

    def __init__(self, path: Path):
        self.config = read_json_object(path / "config.json")
        self._shapes = dict(TENSOR_SHAPES[self.config["model_type"]](self.config))

    def names(self) -> Set[str]:
        """All of them."""
        return self._shapes.keys()

    def read(self, name: str) -> Tensor:
        """bfloat16: factors of norms are 1, and products as large as what they are made of."""
        shape = self._shapes[name]
        if len(shape) == 1:
            return torch.ones(shape, dtype=torch.bfloat16)
        scale = 1.0 if "embed" in name or "wte" in name else shape[1] ** -0.5
        block = torch.roll(self._random_values * scale, zlib.crc32(name.encode()) % NUM_RANDOM_VALUES)
        n = shape[0] * shape[1]
        return block.repeat(-(-n // NUM_RANDOM_VALUES))[:n].view(shape)

    def read_quantized(self, name: str, transposed: bool = False) -> None:
        """Nothing is quantised."""

    @cached_property
    def _random_values(self) -> Tensor:
        return torch.randn(NUM_RANDOM_VALUES, generator=torch.Generator().manual_seed(0)).bfloat16()


def llama_shapes(c: HFConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes."""
    E, M, D = c["hidden_size"], c["intermediate_size"], c["head_dim"]
    q, kv = c["num_attention_heads"] * D, c["num_key_value_heads"] * D
    yield "model.embed_tokens.weight", (c["vocab_size"], E)
    yield "model.norm.weight", (E,)
    if not c["tie_word_embeddings"]:
        yield "lm_head.weight", (c["vocab_size"], E)
    for i in range(c["num_hidden_layers"]):
        at = f"model.layers.{i}."
        for name, out, into in (("q", q, E), ("k", kv, E), ("v", kv, E), ("o", E, q)):
            yield f"{at}self_attn.{name}_proj.weight", (out, into)
        for name, out, into in (("gate", M, E), ("up", M, E), ("down", E, M)):
            yield f"{at}mlp.{name}_proj.weight", (out, into)
        for name in ("input_layernorm", "post_attention_layernorm"):
            yield f"{at}{name}.weight", (E,)


def mpt_shapes(c: HFConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes."""
    E = c["d_model"]
    yield "transformer.wte.weight", (c["vocab_size"], E)
    yield "transformer.norm_f.weight", (E,)
    for i in range(c["n_layers"]):
        at = f"transformer.blocks.{i}."
        for name, out, into in (("attn.Wqkv", 3 * E, E), ("attn.out_proj", E, E)):
            yield f"{at}{name}.weight", (out, into)
        for name, out, into in (("ffn.up_proj", 4 * E, E), ("ffn.down_proj", E, 4 * E)):
            yield f"{at}{name}.weight", (out, into)
        for name in ("norm_1", "norm_2"):
            yield f"{at}{name}.weight", (E,)


TENSOR_SHAPES = {"llama": llama_shapes, "mpt": mpt_shapes}
