"""Laws of budgets: an independent implementation with lists keeps the same tokens; policies that must agree do."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from retain import models
from retain.engine.loop import Engine
from retain.engine.request import Request, SamplingParams
from retain.kernels import GUMBEL
from retain.kernels.reference.noise import key, noise
from retain.kv import policies
from retain.models.decoder import Spec
from retain.models.weights import Weights
from tests.rig import prompts, request, rig, run
from tests.tiny import tiny_source

FAMILIES = ["llama", "gpt2", "mpt", "gemma3_text"]  # grouped heads, learned positions, ALiBi, some layers that slide


class Lists:
    """A model that keeps (position, key, value, score) of every token in a list for each layer and kv head."""

    def __init__(self, family: str, budget: int, recent: int, sinks: int, interval: int, rank: str, **chosen: float):
        self.model = models.build(Weights(tiny_source(family), torch.float32))
        self.spec: Spec = self.model.spec
        self.kept = [[[] for _ in range(self.spec.kv_heads)] for _ in range(self.spec.layers)]
        self.budget, self.recent, self.sinks, self.interval, self.rank = budget, recent, sinks, interval, rank
        self.chosen, self.pos, self.prompt, self.expected, self.seed = chosen, torch.zeros(0), 0, 1, 0
        self.chunk = int(chosen.get("chunk", 0))

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        s, o = self.spec, torch.zeros_like(q)
        R = s.heads // s.kv_heads
        for g, kept in enumerate(self.kept[layer]):
            kept += [[int(p), k[t, g], v[t, g], 0.0] for t, p in enumerate(self.pos)]
            at = torch.tensor([e[0] for e in kept])
            keys, values = torch.stack([e[1] for e in kept]), torch.stack([e[2] for e in kept])
            for t, p in enumerate(self.pos.tolist()):
                seen = (at <= p) & (at > p - (s.windows[layer] or 10**9))
                left = torch.zeros(len(kept))
                for h in range(g * R, (g + 1) * R):
                    x = s.scale * keys @ q[t, h]
                    if s.slopes:
                        x = x + s.slopes[h] * (at - p)
                    x = x.masked_fill(~seen, -torch.inf)
                    o[t, h] = x.softmax(0) @ values
                    left += self.leaves(x, at, layer, h, p)
                fade = self.chosen.get("damping", 0.0 if self.rank == "tova" else 1.0)
                for e, y in zip(kept, left.tolist(), strict=True):
                    e[3] = e[3] * fade + y
        return o

    def leaves(self, x: Tensor, at: Tensor, layer: int, h: int, p: int) -> Tensor:
        """What a query at p with scores x leaves on the tokens at these positions."""
        if self.rank == "snapkv" and p < self.prompt - self.chosen["queries"]:
            return torch.zeros_like(x)
        if self.rank != "keyformer":
            return x.softmax(0)
        tau = 1 + max(p - self.prompt + 1, 0) / self.expected
        step = torch.tensor(p if self.chosen["anew"] else -1)
        return ((x + noise(GUMBEL, key(torch.tensor(self.seed), layer, h, step), at)) / tau).softmax(0)

    def forget(self, now: int) -> None:
        for layer, heads in enumerate(self.kept):
            for g, kept in enumerate(heads):
                if self.spec.windows[layer]:
                    heads[g] = [e for e in kept if e[0] > now - self.spec.windows[layer]]
                elif len(kept) > self.budget and (now < self.prompt or len(kept) == self.budget + self.interval):
                    free = [e for e in kept if self.sinks <= e[0] <= now - self.recent]
                    rank = (lambda e: e[0]) if self.rank in ("window", "sinks") else lambda e: (e[3], e[0])
                    gone = {e[0] for e in sorted(free, key=rank)[: len(kept) - self.budget]}
                    heads[g] = [e for e in kept if e[0] not in gone]

    @torch.inference_mode()
    def generate(self, prompt: list[int], n: int, expected: int, seed: int) -> list[int]:
        tokens, self.prompt, self.expected, self.seed = list(prompt), len(prompt), expected, seed
        fresh = tokens
        for start in range(0, self.prompt - 1, self.chunk)[:-1] if self.chunk else ():  # all chunks but the last
            fresh = tokens[start + self.chunk :]  # what the last chunk is left with
            self.pos = torch.arange(start, start + self.chunk)
            self.model.forward(torch.tensor(tokens[start : start + self.chunk]), self.pos, self.attend)
            self.forget(start + self.chunk - 1)
        while len(tokens) < self.prompt + n:
            self.pos = torch.arange(len(tokens) - len(fresh), len(tokens))
            x = self.model.forward(torch.tensor(fresh), self.pos, self.attend)
            fresh = [int(self.model.logits(x[-1:]).argmax())]
            self.forget(len(tokens) - 1)
            tokens += fresh
        return tokens[self.prompt :]


def positions(engine: Engine, row: int, layer: int, g: int) -> set[int]:
    """Those in the slots of a head."""
    cache = engine.cache
    pages = torch.from_numpy(cache.pages[row, layer, g, : cache.counts[row, layer, g]]).long()
    return {p for p in cache.kv.pos[pages].flatten().tolist() if p >= 0}


CASES = {
    "h2o:budget=40,interval=1": {"rank": "h2o"},
    "h2o:budget=40,interval=7,sinks=3,recent=10": {"rank": "h2o", "recent": 10, "sinks": 3, "interval": 7},
    "h2o:budget=40,interval=1,damping=0.9": {"rank": "h2o", "damping": 0.9},
    "keyformer:budget=40,interval=1": {"rank": "keyformer", "anew": 1},
    "keyformer:budget=40,interval=5,redraw=once": {"rank": "keyformer", "anew": 0, "interval": 5},
    "tova:budget=40,interval=1": {"rank": "tova"},
    "snapkv:budget=40,interval=4,queries=16": {"rank": "snapkv", "queries": 16, "interval": 4},
    "sinks:budget=40,interval=3": {"rank": "sinks", "sinks": 4, "interval": 3},
    "window:budget=40,interval=1": {"rank": "window"},
    "h2o:budget=30,prefill=stream": {"rank": "h2o", "budget": 30, "recent": 9, "interval": 16, "chunk": 13},
    "keyformer:budget=30,prefill=stream": {
        "rank": "keyformer",
        "anew": 1,
        "budget": 30,
        "recent": 9,
        "interval": 16,
        "chunk": 25,
    },
}


@pytest.mark.parametrize("policy", CASES)
@pytest.mark.parametrize("family", FAMILIES)
def test_lists_keep_the_same_tokens(family: str, policy: str) -> None:
    options = {"budget": 40, "recent": 12, "sinks": 0, "interval": 1, **CASES[policy]}
    plain = Lists(family, **options)
    engine, asked = (
        rig(family, step_tokens=int(options.get("chunk", 128)), n_rows=4),
        request([7 * i % 128 for i in range(70)], 201, policy),
    )
    want = plain.generate(asked.prompt, 200, 201, asked.noise_seed)
    engine.add(asked)
    while len(asked.answer) < 200:
        engine.step()
    assert asked.answer == want
    for layer, heads in enumerate(plain.kept):
        for g, kept in enumerate(heads):
            if plain.spec.windows[layer] is None:
                assert {e[0] for e in kept} == positions(engine, asked.row, layer, g)


BUDGETS = [n for n in policies.names() if n not in ("full", "ring")]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", BUDGETS)
def test_a_budget_that_holds_everything_is_full(name: str, family: str) -> None:
    asked = prompts(4, longest=60)
    assert go(family, asked, f"{name}:budget=200") == go(family, asked, "full")
    assert go(family, asked, f"{name}:budget=90,interval=1") == go(family, asked, "full")


def go(family: str, asked: list[list[int]], *chosen: str, backend: str = "cpu") -> list[list[int]]:
    """Answers of 30 tokens, of requests that run together; policies in turn."""
    return run(rig(family, backend=backend), [request(p, 30, chosen[i % len(chosen)]) for i, p in enumerate(asked)])


@pytest.mark.parametrize("family", FAMILIES)
def test_policies_that_must_agree(family: str) -> None:
    asked = [p for p in prompts(20, longest=150) if len(p) > 60][:3]
    h2o = go(family, asked, "h2o:budget=30")
    assert h2o == go(family, asked, "keyformer:budget=30,noise=none,tau=1")
    assert h2o == go(family, asked, "keyformer:budget=30,noise=constant,tau=1")
    assert h2o == go(family, asked, "snapkv:budget=30,queries=1000")
    assert h2o != go(family, asked, "tova:budget=30")
    assert go(family, asked, "window:budget=30") == go(family, asked, "sinks:budget=30,sinks=0")
    assert go(family, asked, "window:budget=30") == go(family, asked, "dilated:budget=30,stride=1")
    assert go(family, asked, "window:budget=30") == go(family, asked, "h2o:budget=30,recent=30")


@pytest.mark.parametrize("family", ["llama", "gpt2", "mpt"])
def test_a_window_is_a_ring(family: str) -> None:
    """From prompts shorter than it: a ring is there while the prompt is computed, a budget after. The newest token
    looks at `budget` others."""
    asked = prompts(4, longest=25)
    assert go(family, asked, "window:budget=32,interval=1") == go(family, asked, "ring:window=33")


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_company_of_any_policy_changes_nothing(family: str, backend: str) -> None:
    chosen = ["h2o:budget=30", "full", "keyformer:budget=50%,interval=2", "ring:window=20", "tova:budget=20"]
    params = [SamplingParams(temperature=0, ignore_eos=True, seed=i) for i in range(5)]
    texts = [p for p in prompts(30, longest=150) if len(p) > 40][:5]

    def ask(i: int) -> Request:
        return request(texts[i], 30, chosen[i], params[i])

    together = run(rig(family, backend=backend), [ask(i) for i in range(5)])
    assert together == [run(rig(family, backend=backend), [ask(i)])[0] for i in range(5)]


def test_what_is_forgotten_comes_back_as_pages() -> None:
    engine, asked = rig("llama", page_size=16), request([i % 128 for i in range(120)], 150, "h2o:budget=40,interval=8")
    engine.add(asked)
    engine.step()
    heads = 3 * 2
    after = engine.cache.total_pages - engine.cache.free_pages
    assert after == heads * 3  # 40 slots
    while len(asked.answer) < 149:
        engine.step()
        assert engine.cache.total_pages - engine.cache.free_pages == heads * 3  # 48 slots
        engine.cache.check()


def test_a_prompt_longer_than_memory_streams_through_its_budget() -> None:
    """300 tokens in pages for 64: refused as a whole, and computed chunk by chunk without ever owning more."""
    heads, chosen = 3 * 2, "h2o:budget=40,interval=8"
    text = [7 * i % 128 for i in range(300)]
    engine = rig("llama", pages=heads * 4, step_tokens=24, n_rows=4)
    with pytest.raises(ValueError, match="pages"):
        engine.add(request(text, 40, chosen))
    asked = request(text, 40, f"{chosen},prefill=stream")
    assert len(run(engine, [asked])[0]) == 40 and max(asked.peaks) == 64 and max(asked.owned) == 48


@pytest.mark.parametrize("family", FAMILIES)
def test_streaming_what_fits_is_full(family: str) -> None:
    asked = prompts(4, longest=60)
    full = run(rig(family), [request(p, 20) for p in asked])
    streamed = run(
        rig(family, step_tokens=24, n_rows=8), [request(p, 20, "h2o:budget=90,prefill=stream") for p in asked]
    )
    assert streamed == full
