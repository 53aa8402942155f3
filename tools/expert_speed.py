"""Time a model of experts beside a dense one that reads as many weights for a token: prefill and decode, in turns.

python -m tools.expert_speed --weights int4
"""

from __future__ import annotations

import argparse
import random
from statistics import median
from time import perf_counter

from retain import LLM, SamplingParams

MODELS = ("random:qwen3-moe-1.4b-a0.3b", "random:qwen3-0.3b")
CONTEXT = 2048


def draw_prompt(length: int, seed: int) -> list[int]:
    """Return random token ids."""
    rng = random.Random(seed)
    return [rng.randrange(1000, 31000) for _ in range(length)]


def generate_seconds(llm: LLM, prompt: list[int], num_tokens: int) -> float:
    """Return how long an answer of so many tokens takes."""
    begin = perf_counter()
    llm.generate([prompt], SamplingParams(max_tokens=num_tokens, temperature=0, ignore_eos=True))
    return perf_counter() - begin


def time_prefill(llm: LLM, length: int, seed: int) -> float:
    """Return the seconds of a prompt's first token."""
    return generate_seconds(llm, draw_prompt(length, seed), 1)


def time_decode(llm: LLM, length: int, seed: int) -> float:
    """Return the seconds of one token of an answer."""
    prompt = draw_prompt(16, seed)
    first = generate_seconds(llm, prompt, 1)
    return (generate_seconds(llm, prompt, 1 + length) - first) / length


def main() -> None:
    """Print medians, and how fast the experts are beside the dense model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", default="int4", help="bf16, int8 or int4")
    parser.add_argument("--prompt-len", type=int, default=512)
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=6, help="the first is not counted")
    args = parser.parse_args()
    llms = {name: LLM(name, weights=args.weights, max_model_len=CONTEXT) for name in MODELS}
    for what, measure, length in (
        ("prefill", time_prefill, args.prompt_len),
        ("decode", time_decode, args.max_tokens),
    ):
        seconds: dict[str, list[float]] = {name: [] for name in MODELS}
        for i in range(args.rounds):
            for name, llm in llms.items():
                seconds[name].append(measure(llm, length, i))
        experts, dense = (median(seconds[name][1:]) for name in MODELS)
        times = f"experts {1000 * experts:.1f} ms, dense {1000 * dense:.1f} ms"
        print(f"{args.weights} {what}: {times}, ratio {dense / experts:.2f}")


if __name__ == "__main__":
    main()
