"""Print what snapshots save and what they cost, on a real model; the exit status is 1 where a law is broken.

    python -m tools.snapshots cuts --model gemma3        texts that leave a long one at 20 random places
    python -m tools.snapshots chat --model gemma3        pages that a chat of 33 turns holds
    python -m tools.snapshots traffic --model gemma3     2,000 turns of 50 chats with edits and branches
    python -m tools.snapshots first-token --model smollm2 --policy gate:budget=50%

`cuts` compares the answers with those of a cold cache in float32, and does so from a disk after a restart too.
`traffic` checks the accountant after every step. `first-token` times the last turn of a chat, which goes on from what
the one before has kept, or computes its whole prompt under the same budget. Tokens of texts are random.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
from collections.abc import Sequence
from math import inf
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import cast

import numpy as np

from retain import LLM, SamplingParams
from retain.engine.request import Request, RequestInput
from retain.kv.eviction import policies
from retain.kv.prefix.cache import PrefixCache
from retain.kv.stores.cost_model import LoadCostModel

MAX_RATIO = 1.3  # pages that a chat may hold, times what its text needs
MAX_GROWTH = 1.05  # of memory in the second half of a run
MIN_SPEEDUP = 10.0


def main(argv: Sequence[str] | None = None) -> int:
    """Run one of the commands and return its exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=COMMANDS)
    parser.add_argument("--model", default="gemma3")
    parser.add_argument("--length", type=int, default=0, help="tokens of the text (default: the command's own)")
    parser.add_argument("--cuts", type=int, default=20)
    parser.add_argument("--turns", type=int, default=0, help="of a chat, or of all chats (default: the command's own)")
    parser.add_argument("--chats", type=int, default=50)
    parser.add_argument("--policy", default="gate:budget=50%", help="of first-token")
    parser.add_argument("--snapshot-interval", type=int, default=2048)
    args = parser.parse_args(argv)
    args.rng = random.Random(0)
    return int(not COMMANDS[args.command](args))


def random_tokens(args: argparse.Namespace, n: int) -> list[int]:
    """Return ids that the vocabularies of both embedded models have."""
    return [args.rng.randrange(10, 20_000) for _ in range(n)]


def answers_of(num_tokens: int) -> SamplingParams:
    """Return parameters of greedy answers of this length."""
    return SamplingParams(max_tokens=num_tokens, temperature=0, ignore_eos=True)


def prefix_cache_of(llm: LLM) -> PrefixCache:
    """Return the prefix cache of an engine that has one."""
    return cast(PrefixCache, llm.cache.prefix_cache)


# ---- cuts ------------------------------------------------------------------------------------------------------------


class AlwaysLoad(LoadCostModel):
    """Load every prefix that a tier has, also where computing is faster."""

    def should_load(
        self, bytes_by_store: dict[str, int], num_tokens: int, latency: float = 0.0, time_limit: float = inf
    ) -> bool:
        """Return True."""
        return True


def open_for_cuts(args: argparse.Namespace, folder: str) -> LLM:
    """Open an engine in float32 over a store on a disk."""
    llm = LLM(
        args.model,
        dtype="float32",
        kv_memory="2GiB",
        tier=f"disk:path={folder},capacity=20GB",
        snapshot_interval=args.snapshot_interval,
    )
    offloader = prefix_cache_of(llm).offloader
    assert offloader
    offloader.cost_model = AlwaysLoad()
    return llm


def offload_all(llm: LLM) -> None:
    """Evict everything to the disk, and wait until it is written."""
    cache = prefix_cache_of(llm)
    cache.tree.evict(cache.tree.num_evictable_pages)
    assert cache.offloader
    cache.offloader.sync()


def run_cuts(args: argparse.Namespace) -> bool:
    """Let texts leave a long one at random places. Returns whether no token differs, and none too many is computed."""
    n = args.length or 6000
    text = random_tokens(args, n)
    params = answers_of(4)
    holds = True
    with TemporaryDirectory() as folder, TemporaryDirectory() as other:
        first = open_for_cuts(args, folder)
        first.generate([text], params)
        offload_all(first)
        first.close()
        restarted = open_for_cuts(args, folder)
        warm = open_for_cuts(args, other)
        warm.generate([text], params)
        block = warm.cache.planner.block_size
        print(f"{args.model}: {n} tokens; at most {args.snapshot_interval} + {block} tokens may be computed again")
        print("cut | computed again | from a disk after a restart | tokens equal to a cold cache", flush=True)
        for i in range(args.cuts):
            cut = args.rng.randrange(1, n)
            prompt = [*text[:cut], *random_tokens(args, 10)]
            found = [warm.generate([prompt], params)[0], restarted.generate([prompt], params)[0]]
            (cold,) = warm.generate([prompt], params, salt=f"cold {i}")
            prefix_cache_of(restarted).tree.clear()
            again = [cut - output.cached_tokens for output in found]
            equal = all(output.token_ids == cold.token_ids for output in found) and not cold.cached_tokens
            print(f"{cut} | {again[0]} | {again[1]} | {'yes' if equal else 'NO'}", flush=True)
            holds = holds and equal and max(again) <= args.snapshot_interval + block
        restarted.close()
        warm.close()
    return holds


# ---- pages -----------------------------------------------------------------------------------------------------------


def run_chat(args: argparse.Namespace) -> bool:
    """Let one chat take turns. Returns whether it holds few more pages than its text and windows need."""
    llm = LLM(args.model, kv_memory="1GiB", snapshot_interval=args.snapshot_interval)
    text = random_tokens(args, args.length or 560)
    turns = args.turns or 33
    cached = 0
    for turn in range(turns):
        (output,) = llm.generate([text], answers_of(24))
        cached = output.cached_tokens
        text = text + output.token_ids
        if turn < turns - 1:
            text = text + random_tokens(args, 16)
    n = len(text) - 1
    held = int(np.count_nonzero(llm.cache.prefix_cache.tree.num_holders))
    needed = llm.cache.planner.pages_held(llm.cache.plan_policy(policies.parse("full"), n), n, n)
    ratio = held / needed
    stats = llm.cache.pool_stats()
    print(
        f"{args.model}: {turns} turns, {n} tokens: {held} pages held, {needed} needed, ratio {ratio:.3f}; "
        f"{stats.num_checkpoints} snapshots; the last turn began with {cached} tokens"
    )
    return ratio <= MAX_RATIO


def resident_bytes() -> int:
    """Return the memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def run_traffic(args: argparse.Namespace) -> bool:
    """Let many chats take turns, with edits and branches. Returns whether memory stays flat in the second half."""
    llm = LLM(args.model, kv_memory="512MiB", snapshot_interval=args.snapshot_interval)
    tree = prefix_cache_of(llm).tree
    rng = args.rng
    texts = [random_tokens(args, rng.randint(20, 200)) for _ in range(args.chats)]
    turns = args.turns or 2000
    print(f"{args.model}: {args.chats} chats, a pool of {llm.cache.total_pages} pages")
    print("turns | texts' tokens | nodes | snapshots | pages held | resident MiB | cached share")
    found: list[tuple[int, int, int]] = []  # snapshots, pages, bytes
    num_prompt = 0
    num_cached = 0
    for turn in range(1, turns + 1):
        i = rng.randrange(args.chats)
        text = texts[i]
        if rng.random() < 0.15 or len(text) > args.length + 600:
            text = text[: rng.randint(1, min(len(text), 600))]
        text = text + random_tokens(args, rng.randint(1, 12))
        request = run_checked(llm, text, 8)
        num_prompt += len(text)
        num_cached += request.stats.num_cached_tokens
        texts[i] = list(request.tokens)
        if rng.random() < 0.1:
            texts[rng.randrange(args.chats)] = list(request.tokens)
        if turn % max(turns // 20, 1) == 0:
            stats = llm.cache.pool_stats()
            held = int(np.count_nonzero(llm.cache.prefix_cache.tree.num_holders))
            found.append((stats.num_checkpoints, held, resident_bytes()))
            nodes = sum(1 for _ in tree.iter_nodes())
            print(
                f"{turn} | {sum(map(len, texts))} | {nodes} | {stats.num_checkpoints} | {held} | "
                f"{found[-1][2] / 2**20:.0f} | {num_cached / num_prompt:.3f}",
                flush=True,
            )
            num_prompt = 0
            num_cached = 0
    half = len(found) // 2
    growth = max(x[2] for x in found[half:]) / max(x[2] for x in found[: half or 1])
    print(f"memory of the second half: {growth:.3f} times that of the first; the accountant balanced after every step")
    return growth <= MAX_GROWTH


def run_checked(llm: LLM, text: Sequence[int], num_tokens: int) -> Request:
    """Run a request, and check the accountant after every step."""
    policy = llm.cache.plan_policy(policies.parse("full"), len(text))
    request = Request(RequestInput(list(text), answers_of(num_tokens), policy, num_tokens))
    llm.engine.add(request)
    while llm.engine.has_unfinished_requests:
        llm.engine.step()
        llm.cache.check()
    return request


# ---- time ------------------------------------------------------------------------------------------------------------


def run_first_token(args: argparse.Namespace) -> bool:
    """Time the last turn of a chat with and without resuming. Returns whether it is much sooner with."""
    n = args.length or 6000
    turns = args.turns or 8
    specs = [args.policy, f"{args.policy},resume=off"]
    llm = LLM(args.model, kv_memory="2GiB", allow_policy=tuple(specs))
    text = random_tokens(args, n - (turns - 1) * (32 + 30))
    print(f"{args.model}, {args.policy}: turn | tokens | cached | first token in ms")
    times = []
    for turn in range(1, turns + 1):
        (output,) = llm.generate([text], answers_of(32), specs[0])
        print(f"{turn} | {len(text)} | {output.cached_tokens} | {1e3 * output.ttft_s:.0f}", flush=True)
        times.append(output.ttft_s)
        if turn < turns:
            text = text + output.token_ids + random_tokens(args, 30)
    (anew,) = llm.generate([text], answers_of(1), specs[1])
    ratio = anew.ttft_s / times[-1]
    print(f"without resuming | {len(text)} | {anew.cached_tokens} | {1e3 * anew.ttft_s:.0f}")
    print(f"{ratio:.1f} times sooner")
    return ratio >= MIN_SPEEDUP


COMMANDS = {"cuts": run_cuts, "chat": run_chat, "traffic": run_traffic, "first-token": run_first_token}


if __name__ == "__main__":
    sys.exit(main())
