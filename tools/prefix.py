"""Check that prefix cache and tiers change no token: real prompts, float32, greedy, one by one and together.

    python tools/prefix.py --data-dir DIR [--num-prompts 12]

Texts of books share beginnings of 40 to 2000 tokens; every policy, on SmolLM2 and on Gemma 3, whose sliding layers see
fewer tokens than that.
"""

from __future__ import annotations

import argparse
import random
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from retain.bench.tasks import load_records
from retain.kv.prefix.cache import PrefixCache
from retain.llm import LLM
from retain.outputs import RequestOutput
from retain.sampling_params import SamplingParams

POLICIES = ("full", "sinks:budget=300", "snapkv:budget=30%", "h2o:budget=40%", "knorm:budget=50%")
GREEDY = SamplingParams(max_tokens=16, temperature=0, ignore_eos=True)
RAM_TIER, DISK_TIER = "ram:capacity=4GiB", "disk:path={},capacity=20GB"


def generate(llm: LLM, prompts: list[list[int]], policy: str, together: bool) -> list[RequestOutput]:
    """Answer the prompts together, or one by one."""
    if together:
        return llm.generate(prompts, GREEDY, policy)
    return [llm.generate(p, GREEDY, policy)[0] for p in prompts]


def offload_all(llm: LLM) -> None:
    """Offload every page of the pool, and wait until all of them are written."""
    prefix_cache = llm.cache.prefix_cache
    assert isinstance(prefix_cache, PrefixCache) and prefix_cache.offloader
    prefix_cache.tree.evict(prefix_cache.tree.num_evictable_pages)
    prefix_cache.offloader.sync()


def make_prompts(llm: LLM, data_dir: Path, num_prompts: int) -> list[list[int]]:
    """Return beginnings of one book, each continued by a piece of another."""
    rng, books = random.Random(1), load_records(data_dir, "books", 2)
    stem, prompts = llm.encode(books[0]["text"][:16_000])[:2000], []
    for _ in range(num_prompts):
        start = rng.randint(0, 20_000)
        own = llm.encode(books[1]["text"][start : start + 2000])
        prompts.append(stem[: rng.randint(40, 2000)] + own[: rng.randint(1, 300)])
    return prompts


class Comparison:
    """Answers of one model, compared with those without a prefix cache."""

    def __init__(self, model: str, expected: dict[str, list[list[int]]]):
        self.model, self.expected, self.num_different = model, expected, 0

    def check(self, policy: str, scenario: str, outputs: list[RequestOutput]) -> None:
        """Compare and print a line."""
        equal = [output.token_ids for output in outputs] == self.expected[policy]
        cached = sum(output.cached_tokens for output in outputs) / sum(output.prompt_tokens for output in outputs)
        print(f"{self.model} {policy} {scenario}: {'same' if equal else 'DIFFERENT'}, {cached:.0%} cached", flush=True)
        self.num_different += not equal


def compare_model(model: str, data_dir: Path, num_prompts: int) -> int:
    """Return how many comparisons of a model differ."""
    cold, warm = (LLM(model, dtype="float32", kv_memory="3GiB", prefix_cache=p) for p in ("off", "exact"))
    prompts = make_prompts(warm, data_dir, num_prompts)
    comparison = Comparison(model, {p: [o.token_ids for o in cold.generate(prompts, GREEDY, p)] for p in POLICIES})
    for policy in POLICIES:
        for scenario in ("one by one", "again", "together"):
            comparison.check(policy, scenario, generate(warm, prompts, policy, scenario == "together"))
    with TemporaryDirectory() as folder:
        for scenario, tier in (("ram", RAM_TIER), ("disk", DISK_TIER), ("disk, after a restart", DISK_TIER)):
            tiered = LLM(model, dtype="float32", kv_memory="3GiB", tier=tier.format(folder))
            if "restart" not in scenario:
                generate(tiered, prompts, "full", together=False)
            for policy in POLICIES:
                offload_all(tiered)
                comparison.check(policy, scenario, generate(tiered, prompts, policy, together=False))
            tiered.close()
    return comparison.num_different


def main() -> int:
    """Return exit code 1 where an answer differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--num-prompts", type=int, default=12)
    args = parser.parse_args()
    return int(sum(compare_model(model, args.data_dir, args.num_prompts) for model in ("smollm2", "gemma3")) > 0)


if __name__ == "__main__":
    sys.exit(main())
