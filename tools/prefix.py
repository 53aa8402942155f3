"""What a prefix tree and tiers leave changes no token: real prompts, float32, greedy, one after the other and together.

    python tools/prefix.py --data DIR [--items 12]

Texts of books that share beginnings of 40 to 2000 tokens, with every policy, on SmolLM2 and on Gemma 3, whose sliding
layers see less than that.
"""

from __future__ import annotations

import argparse
import random
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from retain.bench.tasks import load_records
from retain.llm import LLM
from retain.outputs import RequestOutput
from retain.sampling_params import SamplingParams

POLICIES = ("full", "sinks:budget=300", "snapkv:budget=30%", "h2o:budget=40%", "knorm:budget=50%")
GREEDY = SamplingParams(max_tokens=16, temperature=0, ignore_eos=True)


RAM_TIER, DISK_TIER = "ram:capacity=4GiB", "disk:path={},capacity=20GB"


def generate(llm: LLM, texts: list[list[int]], policy: str, batched: bool) -> list[RequestOutput]:
    """All of them."""
    return llm.generate(texts, GREEDY, policy) if batched else [llm.generate(t, GREEDY, policy)[0] for t in texts]


def offload_all(llm: LLM) -> None:
    """What is in the pool goes to sleep; what is to be written is."""
    reuse = llm.cache.prefix_cache
    assert reuse and reuse.offloader
    reuse.tree.evict(reuse.tree.num_evictable_pages)
    reuse.offloader.sync()


def report_mismatch(
    model: str, policy: str, scenario: str, outputs: list[RequestOutput], expected: dict[str, list[list[int]]]
) -> bool:
    """Whether they are not what was expected."""
    same = [a.token_ids for a in outputs] == expected[policy]
    share = sum(a.cached_tokens for a in outputs) / sum(a.prompt_tokens for a in outputs)
    print(f"{model} {policy} {scenario}: {'same' if same else 'DIFFERENT'}, {share:.0%} cached", flush=True)
    return not same


def main() -> int:
    """0 where all is the same."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--items", type=int, default=12)
    args = parser.parse_args()
    wrong = 0
    for model in ("smollm2", "gemma3"):
        rng, texts = random.Random(1), []
        cold, warm = (LLM(model, dtype="float32", kv_memory="3GiB", prefix=p) for p in ("off", "exact"))
        stem = warm.encode(load_records(args.data, "books", 1)[0]["text"][:16_000])[:2000]
        for _ in range(args.items):
            at = rng.randint(0, 20_000)
            own = warm.encode(load_records(args.data, "books", 2)[1]["text"][at : at + 2000])
            texts.append(stem[: rng.randint(40, 2000)] + own[: rng.randint(1, 300)])
        expected = {p: [a.token_ids for a in cold.generate(texts, GREEDY, p)] for p in POLICIES}
        for policy in POLICIES:
            for how in ("one by one", "again", "together"):
                wrong += report_mismatch(model, policy, how, generate(warm, texts, policy, how == "together"), expected)
        with TemporaryDirectory() as folder:
            for how, tier in (("ram", RAM_TIER), ("ssd", DISK_TIER), ("ssd, after a restart", DISK_TIER)):
                asleep = LLM(model, dtype="float32", kv_memory="3GiB", tier=tier.format(folder))
                if "restart" not in how:
                    generate(asleep, texts, "full", False)
                for policy in POLICIES:
                    offload_all(asleep)
                    wrong += report_mismatch(model, policy, how, generate(asleep, texts, policy, False), expected)
                asleep.close()
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
