"""Measure which share of the memory's bandwidth decoding reaches, counting the bytes that a token must read.

    python -m tools.decode_bandwidth --weights int4

A token must read every matrix but the embedding, of experts only its own, and each state once with its page of tokens.
Decoding and a probe, the dot product of two vectors that no cache holds, run in turns. Each round has its own share.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping
from statistics import median
from time import perf_counter
from typing import Any

import torch

from retain import LLM
from retain.files import read_json_object
from retain.formats.random_weights import TENSOR_SHAPES
from retain.kernels.slots.kv_cache_spec import KVCacheSpec, LinearStateSpec, LinearTokensSpec
from retain.models.resolve import resolve_model
from tools.expert_speed import CONTEXT, time_decode

BITS = {"bf16": 16.0, "int8": 8.5, "int4": 5.0}  # of a number of a matrix, with what its group shares
MODELS = (
    "random:qwen3-0.3b",
    "random:qwen3-moe-1.4b-a0.3b",
    "random:gpt-oss-1.3b-a0.2b",
    "random:qwen3.5-0.3b",
)
PROBE_NUMBERS = 2**27


def weight_bytes(config: Mapping[str, Any], weights: str) -> float:
    """Return the bytes of weights that a token must read."""
    shapes = TENSOR_SHAPES[config["model_type"]](config)
    return sum(tensor_bytes(name, shape, config, weights) for name, shape in shapes)


def tensor_bytes(name: str, shape: tuple[int, ...], config: Mapping[str, Any], weights: str) -> float:
    """Return the bytes of a tensor that a token must read."""
    is_embedding = "embed" in name
    if is_embedding and not config["tie_word_embeddings"]:
        return 0.0
    is_head = is_embedding or name.startswith("lm_head")
    bits = BITS["int8" if is_head and weights == "int4" else weights]
    num_experts = config.get("num_experts") or config.get("num_local_experts")
    share = config["num_experts_per_tok"] / num_experts if ".experts." in name else 1.0
    return share * math.prod(shape) * bits / 8


def state_bytes(spec: KVCacheSpec) -> int:
    """Return the bytes of states and of tokens that are not yet part of them, float32."""
    total = 0
    for layer in spec.caches:
        if isinstance(layer, LinearStateSpec):
            total += 4 * layer.num_value_heads * layer.num_rows * layer.k_dim
        elif isinstance(layer, LinearTokensSpec):
            total += 4 * layer.num_kv_heads * layer.window * (layer.k_dim + layer.v_dim)
    return total


def probe(a: torch.Tensor, b: torch.Tensor) -> float:
    """Return the bytes a second that a dot product reads."""
    begin = perf_counter()
    torch.dot(a, b)
    return (a.nbytes + b.nbytes) / (perf_counter() - begin)


def main() -> None:
    """Print the share of each model: the median of all rounds but the first."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=MODELS, help="random:SHAPE")
    parser.add_argument("--weights", default="int4", choices=BITS)
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=6, help="the first is not counted")
    args = parser.parse_args()
    a, b = (torch.ones(PROBE_NUMBERS) for _ in range(2))
    for model in args.models:
        llm = LLM(model, weights=args.weights, max_model_len=CONTEXT)
        config = read_json_object(resolve_model(model) / "config.json")
        must_read = weight_bytes(config, args.weights) + state_bytes(llm.spec.kv_cache)
        shares = []
        for i in range(args.rounds):
            bandwidth = max(probe(a, b) for _ in range(3))
            shares.append(must_read / time_decode(llm, args.max_tokens, i) / bandwidth)
        print(f"{model} {args.weights}: {must_read / 1e6:.0f} MB a token, share {median(shares[1:]):.2f}", flush=True)
        llm.close()


if __name__ == "__main__":
    main()
