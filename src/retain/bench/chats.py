"""Chats that take turns in one pool, for `retain bench prefix`: how much of what they said is computed again.

`chats`: each turn continues the last one. `edits`: every second turn leaves the text at a random place instead. The
pool is limited to multiples of what the texts of all chats need at the end. Tokens are random.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from time import perf_counter
from typing import Any

import numpy as np

from retain.bench.config import PrefixBenchConfig
from retain.kv.eviction import policies
from retain.kv.prefix.cache import PrefixCache
from retain.llm import LLM
from retain.sampling_params import SamplingParams

WORKLOADS = ("chats", "edits")
Line = dict[str, Any]


def run(llm: LLM, prefix_cache: PrefixCache, workload: str, config: PrefixBenchConfig) -> Iterator[Line]:
    """Yield a line for each policy and size of the pool that the engine's own has room for. Raises ValueError."""
    for policy in config.chat_policies:
        for multiple in config.pool_multiples:
            num_pages = round(multiple * config.num_chats * _pages_of_chat(llm, config, policy))
            if num_pages > llm.cache.total_pages:
                break
            prefix_cache.tree.clear()
            with llm.cache.limit_pages(num_pages):
                line = _run_turns(llm, workload, config, policy)
                stats = llm.cache.pool_stats()
            line |= {"snapshots": stats.num_checkpoints, "snapshot_pages": stats.num_checkpoint_pages}
            held = int(np.count_nonzero(prefix_cache.tree.num_holders))
            line["held_per_need"] = round(held * multiple / num_pages, 3)
            prefix_cache.tree.clear()
            yield {"workload": workload, "policy": policy, "pool": f"{multiple:g}x", "pool_pages": num_pages, **line}


def _pages_of_chat(llm: LLM, config: PrefixBenchConfig, policy: str) -> int:
    """Return the pages of a chat at its end."""
    length = config.chat_len + config.num_turns * (config.user_len + config.answer_len)
    return llm.cache.pages_needed(llm.cache.plan_policy(policies.parse(policy), length), length, 1)


def _run_turns(llm: LLM, workload: str, config: PrefixBenchConfig, policy: str) -> Line:
    """Let the chats take turns. A turn may begin with all tokens that were computed of its text; others are lost."""
    rng = random.Random(0)

    def tokens(n: int) -> list[int]:
        return [rng.randrange(llm.spec.vocab_size) for _ in range(n)]

    params = SamplingParams(max_tokens=config.answer_len, temperature=0, ignore_eos=True)
    texts = [tokens(config.chat_len) for _ in range(config.num_chats)]
    known = [0] * config.num_chats  # tokens of each text that were computed before
    num_known = 0
    num_lost = 0
    ttft_s = []  # of the turns of each round
    begin = perf_counter()
    for turn in range(config.num_turns):
        found = []
        for i, text in enumerate(texts):
            if turn and workload == "edits" and turn % 2 == 0:
                del text[rng.randrange(1, len(text)) :]
            known[i] = min(known[i], len(text))
            text += tokens(config.user_len)
            (output,) = llm.generate([text], params, policy)
            num_known += known[i]
            num_lost += max(known[i] - output.cached_tokens, 0)
            found.append(output.ttft_s)
            text += output.token_ids
            known[i] = len(text) - 1
        ttft_s.append(float(np.median(found)))
    seconds = perf_counter() - begin
    (cold,) = llm.generate([texts[0]], SamplingParams(max_tokens=1, temperature=0), policy, salt="cold")
    return {
        "turns": config.num_chats * config.num_turns,
        "prompt_tokens": len(texts[0]),
        "lost_share": round(num_lost / max(num_known, 1), 4),
        "first_ttft_ms": round(1e3 * ttft_s[0], 1),
        "last_ttft_ms": round(1e3 * ttft_s[-1], 1),
        "cold_ttft_ms": round(1e3 * cold.ttft_s, 1),
        "seconds": round(seconds, 2),
    }
