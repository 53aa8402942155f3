"""Measure the memory that loading a file of experts takes beyond its packed weights.

    python -m tools.load_peak                        all cases
    python -m tools.load_peak qwen3_moe-bf16         one
    python -m tools.load_peak --file model.gguf      a file or folder of yours

Each case writes random weights of two layers of a published model, and loads them in a process of its own. Prints the
packed weights, the cache, the peak, and what the peak has beyond the weights and the process before it loads. Loading
touches no page of the cache.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file
from tokenizers.pre_tokenizers import ByteLevel
from torch import Tensor

from retain import LLM
from retain.formats.random_weights import TENSOR_SHAPES, create_folder
from retain.plugins import parse_size

Q4_0 = gguf.GGMLQuantizationType.Q4_0
GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "model.layers.": "blk.",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate.": "ffn_gate_inp.",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
KV_MEMORY = "256MiB"
SPREAD = 0.02  # of random weights
QWEN3_30B_A3B: dict[str, Any] = {
    "model_type": "qwen3_moe", "vocab_size": 32000, "hidden_size": 2048, "intermediate_size": 6144,
    "num_hidden_layers": 2, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128,
    "max_position_embeddings": 32768, "rms_norm_eps": 1e-6, "rope_theta": 1e6, "tie_word_embeddings": True,
    "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": True,
}  # fmt: skip
GPT_OSS_20B: dict[str, Any] = {
    "model_type": "gpt_oss", "vocab_size": 32000, "hidden_size": 2880, "intermediate_size": 2880,
    "num_hidden_layers": 2, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64,
    "max_position_embeddings": 32768, "rms_norm_eps": 1e-5, "rope_theta": 150000.0, "tie_word_embeddings": True,
    "num_local_experts": 32, "num_experts_per_tok": 4, "sliding_window": 128, "swiglu_limit": 7.0,
    "attention_bias": True, "layer_types": ["sliding_attention", "full_attention"], "hidden_act": "silu",
}  # fmt: skip


def random_matrix(*shape: int) -> Tensor:
    """Return random bfloat16, by repeating a million numbers."""
    block = (torch.randn(1_000_003) * SPREAD).bfloat16()
    n = int(np.prod(shape))
    return block.repeat(-(-n // len(block)))[:n].view(shape)


def make_tensors(c: dict[str, Any], without: str | None = None) -> dict[str, Tensor]:
    """Return the tensors of a model, but those whose names contain `without`: vectors of ones, and random matrices."""
    shapes = TENSOR_SHAPES[c["model_type"]](c)
    return {
        name: random_matrix(*shape) if len(shape) > 1 else torch.ones(shape)
        for name, shape in shapes
        if without is None or without not in name
    }


def write_qwen3_moe(path: Path, stacked: bool) -> None:
    """Write experts one by one, or stacked [n, out, in]."""
    c = QWEN3_30B_A3B
    tensors = make_tensors(c, ".experts." if stacked else None)
    E, M, n = c["hidden_size"], c["moe_intermediate_size"], c["num_experts"]
    for i in range(c["num_hidden_layers"]) if stacked else ():
        experts = f"model.layers.{i}.mlp.experts."
        tensors[f"{experts}gate_up_proj"] = random_matrix(n, 2 * M, E)
        tensors[f"{experts}down_proj"] = random_matrix(n, E, M)
    write_folder(path, c, tensors)


def write_gpt_oss(path: Path, mxfp4: bool) -> None:
    """Write experts in MXFP4, or in bfloat16 [n, in, out]."""
    c = GPT_OSS_20B
    tensors = make_tensors(c)
    for name in [name for name in tensors if mxfp4 and name.endswith(("gate_up_proj", "down_proj"))]:
        n, width, out = tensors.pop(name).shape
        tensors[f"{name}_blocks"] = torch.randint(256, (n, out, width // 32, 16), dtype=torch.uint8)
        tensors[f"{name}_scales"] = torch.full((n, out, width // 32), 118, dtype=torch.uint8)
    write_folder(path, c | ({"quantization_config": {"quant_method": "mxfp4"}} if mxfp4 else {}), tensors)


def write_gguf(path: Path) -> None:
    """Write a GGUF file with experts in Q4_0."""
    c = QWEN3_30B_A3B
    w = gguf.GGUFWriter(path / "model.gguf", "qwen3moe")
    w.add_block_count(c["num_hidden_layers"])
    w.add_context_length(c["max_position_embeddings"])
    w.add_embedding_length(c["hidden_size"])
    w.add_feed_forward_length(c["intermediate_size"])
    w.add_head_count(c["num_attention_heads"])
    w.add_head_count_kv(c["num_key_value_heads"])
    w.add_key_length(c["head_dim"])
    w.add_value_length(c["head_dim"])
    w.add_layer_norm_rms_eps(c["rms_norm_eps"])
    w.add_rope_freq_base(c["rope_theta"])
    w.add_expert_count(c["num_experts"])
    w.add_expert_used_count(c["num_experts_per_tok"])
    w.add_expert_feed_forward_length(c["moe_intermediate_size"])
    w.add_tokenizer_model("gpt2")
    w.add_tokenizer_pre("gpt-2")
    bytes_and_words = [*sorted(ByteLevel.alphabet()), *(f"w{i}" for i in range(256, c["vocab_size"]))]
    w.add_token_list(bytes_and_words)
    w.add_token_merges([])
    w.add_token_types([1] * c["vocab_size"])
    for name, x in make_tensors(c, without=".experts.").items():
        add_tensor(w, GGUF_NAMES, name, x)
    E, M, n = c["hidden_size"], c["moe_intermediate_size"], c["num_experts"]
    for i in range(c["num_hidden_layers"]):
        for stem, shape in (("gate", (n, M, E)), ("up", (n, M, E)), ("down", (n, E, M))):
            w.add_tensor(f"blk.{i}.ffn_{stem}_exps.weight", random_q4_0(*shape), raw_dtype=Q4_0)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()


def add_tensor(w: gguf.GGUFWriter, names: dict[str, str], name: str, x: Tensor) -> None:
    """Add a tensor under llama.cpp's name, matrices but routers in Q4_0."""
    for before, after in names.items():
        name = name.replace(before, after)
    if x.ndim == 1 or "ffn_gate_inp" in name:
        w.add_tensor(name, x.float().numpy())
    else:
        w.add_tensor(name, random_q4_0(*x.shape), raw_dtype=Q4_0)


def random_q4_0(*shape: int) -> NDArray[np.uint8]:
    """Return random blocks of 18 bytes, [.., bytes of a row], whose scales are equal."""
    blocks = np.random.default_rng(0).integers(0, 256, (*shape[:-1], shape[-1] // 32, 18), np.uint8)
    blocks[..., :2] = np.frombuffer(np.float16(SPREAD / 8).tobytes(), np.uint8)
    return blocks.reshape(*shape[:-1], -1)


def write_folder(path: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """Write a folder with the tokenizer of a random model."""
    save_file(tensors, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(config))
    tokenizer = create_folder("qwen3-moe-1.4b-a0.3b", path) / "tokenizer.json"
    (path / "tokenizer.json").write_bytes(tokenizer.read_bytes())


def measure(path: Path, weights: str) -> dict[str, Any]:
    """Load a model in this process, and return what that took, in MiB."""
    before = high_water_mib()
    llm = LLM(str(path), weights=weights, kv_memory=KV_MEMORY)
    loaded = high_water_mib()
    packed = llm.program.weight_bytes >> 20
    return {
        "packed_mib": packed,
        "kv_mib": parse_size(KV_MEMORY) >> 20,
        "before_mib": before,
        "peak_mib": loaded,
        "beyond_mib": loaded - before - packed,
    }


def high_water_mib() -> int:
    """Return the largest resident memory of this process so far, mapped files included."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) >> 10


CASES: dict[str, Callable[[Path], None]] = {
    "qwen3_moe-bf16": lambda path: write_qwen3_moe(path, stacked=False),
    "qwen3_moe-stacked": lambda path: write_qwen3_moe(path, stacked=True),
    "gpt_oss-mxfp4": lambda path: write_gpt_oss(path, mxfp4=True),
    "qwen3_moe-gguf": write_gguf,
    "gpt_oss-bf16": lambda path: write_gpt_oss(path, mxfp4=False),
}


def main() -> None:
    """Print a line of JSON for each case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"of {', '.join(CASES)}; all by default")
    parser.add_argument("--weights", default="auto")
    parser.add_argument("--file", type=Path)
    args = parser.parse_args()
    if args.file:
        print(json.dumps(measure(args.file, args.weights)))
        return
    for name in args.cases or CASES:
        with tempfile.TemporaryDirectory() as folder:
            CASES[name](Path(folder))
            path = next(Path(folder).glob("*.gguf"), Path(folder))
            command = [sys.executable, "-m", "tools.load_peak", "--file", str(path), "--weights", args.weights]
            found = subprocess.run(command, check=True, capture_output=True, text=True).stdout
            print(name, args.weights, found.strip(), flush=True)


if __name__ == "__main__":
    main()
