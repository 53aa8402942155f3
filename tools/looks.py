"""Draw which tokens the heads of one layer attend to, step by step of an answer that looks at few.

    python -m tools.looks PROMPT.txt OUT.png --model smollm2 --layer 15 --policy look:slots=12.5%

The reference backend computes the answer, because it names what it chose. Needs matplotlib.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import matplotlib

matplotlib.use("Agg")  # draws without a screen
import matplotlib.pyplot as plt
import torch
from torch import Tensor

from retain import LLM, SamplingParams
from retain.kernels import reference


class Recorder:
    """Records what tokens attend to in one layer: bool [positions] of each kv head, call by call."""

    def __init__(self, layer: int):
        self.layer = layer
        self.is_recording = False
        self.attended: list[Tensor] = []

    def attend(self, *args: Any, layer: int = 0, **more: Any) -> Tensor:
        """Attend as the backend does; what is chosen meanwhile counts if it is the layer's."""
        self.is_recording = layer == self.layer
        return ATTEND(*args, layer=layer, **more)

    def look(self, *args: Any) -> Any:
        """Choose as the backend does."""
        found = LOOK(*args)
        if self.is_recording:
            pos = args[2][0]  # of slots, which a budget fills in any order
            attended = torch.zeros(int(pos.max()) + 1, dtype=torch.bool)
            attended[pos[found.attended[-1]].long()] = True
            self.attended.append(attended)
        return found


ATTEND, LOOK = reference.attend, reference.look


def record(model: str, policy: str, prompt: str, layer: int, num_tokens: int) -> tuple[list[Tensor], int]:
    """Return what the heads of a layer attend to, [steps, positions] of each, and the tokens of the prompt."""
    recorder = Recorder(layer)
    with patch.multiple(reference, attend=recorder.attend, look=recorder.look):
        llm = LLM(model, backend="reference", kv_policy=policy)
        llm.generate(prompt, SamplingParams(max_tokens=num_tokens, temperature=0, ignore_eos=True))
    if not recorder.attended:
        raise SystemExit(f"looks.py: no token looks in layer {layer} under {policy}")
    G = llm.spec.kv_cache.groups[0].num_kv_heads
    width = max(len(x) for x in recorder.attended)
    steps = [torch.nn.functional.pad(x, (0, width - len(x))) for x in recorder.attended]
    return [torch.stack(steps[g::G]) for g in range(G)], len(llm.encode(prompt))


def draw(heads: Sequence[Tensor], num_prompt_tokens: int, title: str, out: Path) -> None:
    """Draw a picture for each kv head: positions from left to right, tokens of the answer from top to bottom."""
    size = (10, 0.8 + 1.5 * len(heads))
    figure, axes = plt.subplots(len(heads), 1, figsize=size, constrained_layout=True, sharex=True, squeeze=False)
    for g, (attended, axis) in enumerate(zip(heads, axes[:, 0], strict=True)):
        end = num_prompt_tokens + len(attended)
        axis.imshow(attended[:, :end], aspect="auto", cmap="Greys", interpolation="nearest", vmin=0, vmax=1)
        axis.axvline(num_prompt_tokens - 0.5, color="tab:red", linewidth=0.8)
        axis.set(ylabel=f"kv head {g}\ntoken of the answer")
    axes[0, 0].set(title=title)
    axes[-1, 0].set(xlabel="position")
    figure.savefig(out, dpi=120)


def main(argv: Sequence[str] | None = None) -> None:
    """Write the picture."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path, help="a prompt")
    parser.add_argument("out", type=Path, help="the picture")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--policy", default="look:slots=12.5%")
    parser.add_argument("--layer", type=int, default=15, help="by its number in the model")
    parser.add_argument("--num-tokens", type=int, default=64, help="of the answer")
    args = parser.parse_args(argv)
    prompt = args.file.read_text(encoding="utf-8")
    heads, num_prompt_tokens = record(args.model, args.policy, prompt, args.layer, args.num_tokens)
    draw(heads, num_prompt_tokens, f"{args.model}, layer {args.layer}, {args.policy}", args.out)
    print(args.out)


if __name__ == "__main__":
    main()
