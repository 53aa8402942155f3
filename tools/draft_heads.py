"""Time decoding with draft heads that are never right, and with one that always is, on models of random weights.

    python -m tools.draft_heads [--head mtp] [--weights int8] [--rounds 5] [--num-tokens 400]

The target is a Gemma 4 for `assistant`, and a Qwen3.5 for `mtp`, of about 170 million weights. Its layers add nothing
where the head is to be right: then both know the newest token alone. A line gives tokens a second, medians in turns,
and the ratio to plain decoding of the same target.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from time import perf_counter
from unittest.mock import patch

import torch
from torch import Tensor

from retain import LLM, SamplingParams
from tests.helpers import folders, tiny_heads
from tests.helpers.tiny_models import TinyCheckpoint, tiny_checkpoint

WIDTH = 1024
SIZES = {
    "hidden_size": WIDTH,
    "intermediate_size": 4096,
    "num_hidden_layers": 12,
    "num_attention_heads": 8,
    "head_dim": 128,
    "global_head_dim": 256,
    "sliding_window": 512,
    "layer_types": [*["sliding_attention"] * 5, "full_attention"] * 2,
}
QWEN_SIZES = {
    "hidden_size": WIDTH,
    "intermediate_size": 4096,
    "num_hidden_layers": 12,
    "layer_types": [*["linear_attention"] * 3, "full_attention"] * 3,
    "num_attention_heads": 8,
    "head_dim": 128,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 8,
    "linear_num_value_heads": 8,
}
DRAFTERS = ("k=auto", "k=1", "k=3", "k=7")


def write_assistant(folder: Path, is_right: bool) -> tuple[Path, str]:
    """Write a Gemma 4 and its assistant. Returns the folder of the first, and the drafter."""
    read = TinyCheckpoint.read

    def read_weight(checkpoint: TinyCheckpoint, name: str) -> Tensor:
        if is_right and name.endswith("pre_projection.weight"):
            return torch.eye(WIDTH, 2 * WIDTH)  # the embedding of the newest token
        return read(checkpoint, name) * (not is_right or not name.endswith(("o_proj.weight", "down_proj.weight")))

    target, head = folder / "target", folder / "head"
    for path in (target, head):
        path.mkdir(parents=True)
    with (
        patch.object(TinyCheckpoint, "read", read_weight),
        patch.object(tiny_heads, "HIDDEN_SIZE", WIDTH if is_right else 256),
    ):
        folders.save_tiny_smollm2(target, "gemma4_text", **SIZES)
        config = json.loads((target / "config.json").read_text())
        folders.save_model_folder(head, tiny_heads.tiny_assistant(config))
    return target, f"assistant:model={head}"


def write_mtp(folder: Path, is_right: bool) -> tuple[Path, str]:
    """Write a Qwen3.5 with an MTP layer. Returns its folder, and the drafter."""
    read = TinyCheckpoint.read

    def read_weight(checkpoint: TinyCheckpoint, name: str) -> Tensor:
        if not is_right:
            return read(checkpoint, name)
        if name == "mtp.fc.weight":
            return torch.eye(WIDTH, 2 * WIDTH)  # the embedding of the newest token
        if name == "mtp.pre_fc_norm_embedding.weight":
            return torch.zeros(WIDTH)
        adds_nothing = name.endswith(("o_proj.weight", "down_proj.weight", "out_proj.weight"))
        return read(checkpoint, "model.norm.weight" if name == "mtp.norm.weight" else name) * (not adds_nothing)

    folder.mkdir(parents=True, exist_ok=True)
    with patch.object(TinyCheckpoint, "read", read_weight):
        folders.save_tiny_smollm2(folder, "qwen3_5_text", **QWEN_SIZES)
        config = json.loads((folder / "config.json").read_text())
        folders.save_model_folder(folder, tiny_heads.with_mtp_layer(tiny_checkpoint(**config)))
    return folder, "mtp:"


HEADS = {"assistant": write_assistant, "mtp": write_mtp}


def time_drafters(target: Path, drafter: str, args: argparse.Namespace) -> list[tuple[str, float]]:
    """Return the tokens a second without a head, and with it for each k: medians in turns."""
    params = SamplingParams(max_tokens=args.num_tokens, temperature=0, ignore_eos=True)
    specs = [None, *(f"{drafter}{'' if drafter[-1] == ':' else ','}{k}" for k in DRAFTERS)]
    llms = [LLM(str(target), weights=args.weights, speculate=s, kv_memory="256MiB", max_model_len=2048) for s in specs]
    speeds: list[list[float]] = [[] for _ in llms]
    for i in range(args.rounds):
        answers = []
        for llm, found in zip(llms, speeds, strict=True):
            started = perf_counter()
            (output,) = llm.generate(f"The sea is {i}", params)
            found.append(len(output.token_ids) / (perf_counter() - started))
            answers.append(output.token_ids)
        assert all(answer == answers[0] for answer in answers), "drafts changed an answer"
    return list(zip(["plain", *DRAFTERS], map(median, speeds), strict=True))


def main(argv: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--head", choices=HEADS, default="assistant")
    parser.add_argument("--weights", default="int8")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--num-tokens", type=int, default=400)
    args = parser.parse_args(argv)
    for name, is_right in (("never right", False), ("always right", True)):
        with tempfile.TemporaryDirectory() as folder:
            speeds = time_drafters(*HEADS[args.head](Path(folder), is_right), args)
        for drafter, speed in speeds:
            print(f"{name:13} {drafter:7} {speed:7.1f} tokens/s {speed / speeds[0][1]:6.3f}", flush=True)


if __name__ == "__main__":
    main()
