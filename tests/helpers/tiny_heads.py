"""Draft heads of random weights for the tiny models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFWriter
from torch import Tensor

from retain.engine.runner import HeadRunner
from retain.kernels.api import Program
from retain.models import build_head, load_family
from retain.models.decoder import Decoder
from retain.models.heads import HeadTarget
from retain.models.mtp import QWEN_NAMES, name_as_layer
from retain.models.weights import Weights
from tests.helpers.gguf_dense import permute_rows
from tests.helpers.gguf_files import BYTE_LEVEL_VOCABULARY, add_metadata, list_metadata, write_gguf
from tests.helpers.tiny_models import TinyCheckpoint, gemma4_shapes, tiny_checkpoint

MTP_ENDS = ("eh_proj", "enorm", "hnorm", "shared_head.norm")
NUM_CLUSTERS, TOP_CLUSTERS = 16, 4
HIDDEN_SIZE = 32


def assistant_config(target: dict[str, Any], ordered: bool = False) -> dict[str, Any]:
    """Return the config of an assistant for a Gemma 4: three sliding layers and a full one, half as wide."""
    c = target.get("text_config", target)
    text = {
        "global_head_dim": 32,
        **c,
        "model_type": "gemma4_text",
        "hidden_size": HIDDEN_SIZE,
        "intermediate_size": 48,
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
        "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": 0,
        "num_kv_shared_layers": 4,
        "use_double_wide_mlp": False,
        "enable_moe_block": False,
        "final_logit_softcapping": None,
    }
    return {
        "model_type": "gemma4_assistant",
        "text_config": text,
        "backbone_hidden_size": c["hidden_size"],
        "use_ordered_embeddings": ordered,
        "num_centroids": NUM_CLUSTERS,
        "centroid_intermediate_top_k": TOP_CLUSTERS,
        "tie_word_embeddings": True,
    }


class AssistantCheckpoint(TinyCheckpoint):
    """The checkpoint of an assistant; a cluster has every sixteenth token of a permutation."""

    def read(self, name: str) -> Tensor:
        if name.endswith("token_ordering"):
            return torch.randperm(self.shapes[name][0], generator=torch.Generator().manual_seed(self.seed))
        return super().read(name)


def tiny_assistant(target: dict[str, Any], seed: int = 0, ordered: bool = False) -> AssistantCheckpoint:
    """Create the checkpoint of an assistant for a target with this config."""
    config = assistant_config(target, ordered)
    text = config["text_config"]
    h, E = text["hidden_size"], config["backbone_hidden_size"]
    shapes = dict(gemma4_shapes(text)) | {"pre_projection.weight": (h, 2 * E), "post_projection.weight": (E, h)}
    if ordered:
        shapes["masked_embedding.centroids.weight"] = (NUM_CLUSTERS, h)
        shapes["masked_embedding.token_ordering"] = (text["vocab_size"],)
    return AssistantCheckpoint(config, shapes, seed)


def with_mtp_layer(checkpoint: TinyCheckpoint) -> TinyCheckpoint:
    """Return the checkpoint with an MTP layer, named as the family's files have it."""
    config = checkpoint.config
    family = load_family(config["model_type"])
    layer = family.MTP_LAYER.number(config)
    extended = tiny_checkpoint(**config | family.MTP_LAYER.add_layer(config))
    prefix = next(n for n in extended.shapes if f"layers.{layer}." in n).partition("layers.")[0] + f"layers.{layer}."
    own = {n.removeprefix(prefix): shape for n, shape in extended.shapes.items() if n.startswith(prefix)}
    E = config.get("text_config", config)["hidden_size"]
    names = {v: k for k, v in QWEN_NAMES.items()} if family.MTP_LAYER.norm_offset else {}
    ends = {"eh_proj": (E, 2 * E), "enorm": (E,), "hnorm": (E,), "shared_head.norm": (E,)}
    shapes = {f"{names.get(n, prefix + n)}.weight": shape for n, shape in ends.items()}
    shapes |= {f"{'mtp.layers.0.' if names else prefix}{n}": shape for n, shape in own.items()}
    return TinyCheckpoint(config, checkpoint.shapes | shapes, checkpoint.seed)


class NamedAsLayer(TinyCheckpoint):
    """A checkpoint whose MTP layer is named as one behind the last, as GGUF has it."""

    @classmethod
    def of(cls, checkpoint: TinyCheckpoint) -> NamedAsLayer:
        number = load_family(checkpoint.config["model_type"]).MTP_LAYER.number(checkpoint.config)
        aliases = name_as_layer(checkpoint.names(), number)
        shapes = checkpoint.shapes | {alias: checkpoint.shapes[name] for alias, name in aliases.items()}
        return cls(checkpoint.config, shapes, checkpoint.seed)

    def names(self) -> set[str]:
        return {name for name in self.shapes if not name.startswith("mtp.")}

    def read(self, name: str) -> Tensor:
        number = load_family(self.config["model_type"]).MTP_LAYER.number(self.config)
        return super().read(name_as_layer(set(self.shapes), number).get(name, name))


def write_mtp_gguf(path: Path, checkpoint: TinyCheckpoint) -> Path:
    """Write a checkpoint with an MTP layer as llama.cpp's converter does."""
    arch, _ = list_metadata(checkpoint)
    n = checkpoint.config["num_hidden_layers"]
    named = NamedAsLayer.of(checkpoint)
    own = {end: next(name for name in named.names() if name.endswith(f"{end}.weight")) for end in MTP_ENDS}
    is_centered = arch.startswith("qwen")  # norms multiply by 1 + w
    tensors = {
        f"blk.{n}.nextn.{end.replace('.', '_')}.weight": (named.read(name) + (is_centered and "norm" in end)).numpy()
        for end, name in own.items()
    }
    rest = NamedAsLayer(named.config, {k: v for k, v in named.shapes.items() if k not in own.values()}, named.seed)
    extra = {f"{arch}.block_count": n + 1, f"{arch}.nextn_predict_layers": 1}
    return write_gguf(path, rest, extra=extra | BYTE_LEVEL_VOCABULARY, tensors=tensors)


EAGLE3_CONFIGS: dict[str, dict[str, Any]] = {
    "plain": {"draft_vocab_size": 48},
    "other": {  # of other sizes than its target, and with the other kind of each step
        "transformer_layer_config": {"hidden_size": 32, "num_attention_heads": 2, "model_type": "qwen3"},
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 2]},
        "norm_before_residual": True,
        "norm_before_fc": True,
        "norm_output": True,
    },
}


class Eagle3Checkpoint(TinyCheckpoint):
    """The checkpoint of an EAGLE-3 head; `d2t` has the distances to some tokens of the target."""

    def read(self, name: str) -> Tensor:
        if name != "d2t":
            return super().read(name)
        n = self.shapes[name][0]
        known = torch.randperm(self.config["vocab_size"], generator=torch.Generator().manual_seed(self.seed))[:n]
        return known.sort().values - torch.arange(n)


def tiny_eagle3(target: dict[str, Any], kind: str) -> Eagle3Checkpoint:
    """Create the checkpoint of an EAGLE-3 head for a target with this config."""
    c = target.get("text_config", target)
    given = EAGLE3_CONFIGS[kind]
    layer = {
        "model_type": "llama",
        "hidden_size": c["hidden_size"],
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "num_hidden_layers": 1,
        "vocab_size": c["vocab_size"],
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        **given.get("transformer_layer_config", {}),
    }
    config = {"model_type": "llama", **layer, **given}
    if "transformer_layer_config" in given:
        config["transformer_layer_config"] = layer
    h, E, V = layer["hidden_size"], c["hidden_size"], c["vocab_size"]
    H, G, n = layer["num_attention_heads"] * 16, 2 * 16, given.get("draft_vocab_size", V)
    p = "midlayer." if kind == "plain" else "layers.0."
    num_states = len(given.get("eagle_config", {}).get("eagle_aux_hidden_state_layer_ids", [0, 0, 0]))
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (h, num_states * E),
        "norm.weight": (h,),
        "lm_head.weight": (n, h),
        **{f"{p}{name}.weight": (h,) for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm")},
        f"{p}self_attn.q_proj.weight": (H, 2 * h),
        f"{p}self_attn.k_proj.weight": (G, 2 * h),
        f"{p}self_attn.v_proj.weight": (G, 2 * h),
        f"{p}self_attn.o_proj.weight": (h, H),
        f"{p}mlp.gate_proj.weight": (48, h),
        f"{p}mlp.up_proj.weight": (48, h),
        f"{p}mlp.down_proj.weight": (h, 48),
    }
    if kind == "other":
        shapes |= {f"{p}self_attn.{name}_norm.weight": (16,) for name in ("q", "k")}
        shapes |= {"embed_tokens.weight": (V, h), "input_norm.weight": (num_states * E,)}
    else:
        shapes |= {"d2t": (n,), "t2d": (V,)} if n < V else {}
    return Eagle3Checkpoint(config, shapes, 0)


def write_eagle3_gguf(path: Path, checkpoint: Eagle3Checkpoint, extract_layers: list[int]) -> Path:
    """Write a head as llama.cpp's converter does: rows of q and k as Llama's, `d2t` as integers."""
    c = checkpoint.config
    names = {
        "fc": "fc",
        "norm": "output_norm",
        "lm_head": "output",
        "midlayer.input_layernorm": "blk.0.attn_norm",
        "midlayer.hidden_norm": "blk.0.attn_norm_2",
        "midlayer.post_attention_layernorm": "blk.0.ffn_norm",
        **{f"midlayer.self_attn.{part}_proj": f"blk.0.attn_{part}" for part in "qkv"},
        "midlayer.self_attn.o_proj": "blk.0.attn_output",
        **{f"midlayer.mlp.{part}_proj": f"blk.0.ffn_{part}" for part in ("gate", "up", "down")},
    }
    w = GGUFWriter(path, "eagle3")
    sizes = {
        "block_count": 1,
        "context_length": c["max_position_embeddings"],
        "embedding_length": c["hidden_size"],
        "feed_forward_length": c["intermediate_size"],
        "attention.head_count": c["num_attention_heads"],
        "attention.head_count_kv": c["num_key_value_heads"],
        "attention.key_length": c["head_dim"],
        "attention.layer_norm_rms_epsilon": c["rms_norm_eps"],
        "rope.freq_base": c["rope_theta"],
        "extract_layers": extract_layers,
        "norm_before_residual": False,
    }
    for key, value in sizes.items():
        add_metadata(w, f"eagle3.{key}", value)
    for name, gguf_name in names.items():
        x = permute_rows(f".{name}.", checkpoint.read(f"{name}.weight").numpy(), c)
        w.add_tensor(f"{gguf_name}.weight", np.ascontiguousarray(x))
    w.add_tensor("d2t", checkpoint.read("d2t").numpy())
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    return path


def load_assistant(
    program: Program,
    target: Decoder,
    config: dict[str, Any],
    dtype: torch.dtype,
    ordered: bool = False,
    quantization: str = "auto",
) -> HeadRunner:
    """Load the tiny assistant of a target into a program of a dtype."""
    checkpoint = tiny_assistant(config, ordered=ordered)
    weights = Weights(checkpoint, dtype, quantization, vector_dtype=program.vector_dtype)
    head = build_head(weights, HeadTarget(target.spec, target.token_embedding, target.key_factors), program)
    return HeadRunner(program, head.hidden_size, head.restrict)


def write_assistant_gguf(path: Path, checkpoint: AssistantCheckpoint, ggml_type: str = "F32") -> Path:
    """Write an assistant as llama.cpp's converter does: its text model, with two projections beside it."""
    text = AssistantCheckpoint(
        checkpoint.config["text_config"],
        {n: s for n, s in checkpoint.shapes.items() if n.startswith("model.")},
        checkpoint.seed,
    )
    tensors = {f"nextn.{n}": checkpoint.read(n).numpy() for n in ("pre_projection.weight", "post_projection.weight")}
    arch = "gemma4-assistant"
    extra = {
        f"{arch}.embedding_length_out": checkpoint.config["backbone_hidden_size"],
        f"{arch}.nextn_predict_layers": text.config["num_hidden_layers"],
        f"{arch}.embedding_length_per_layer_input": None,
    }
    return write_gguf(path, text, ggml_type, extra=extra, tensors=tensors, named=arch)
