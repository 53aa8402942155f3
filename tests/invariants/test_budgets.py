"""Laws of budgets: an independent implementation with lists keeps the same tokens; policies that must agree do."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from retain import models
from retain.engine.engine import Engine
from retain.engine.request import Request
from retain.kernels.api import GUMBEL
from retain.kernels.reference.noise import noise_key, sample_noise
from retain.kv.eviction import policies
from retain.models.decoder import ModelSpec
from retain.models.weights import Weights
from retain.sampling_params import SamplingParams
from tests.helpers.attention_case import assert_close
from tests.helpers.engines import make_engine, make_request, random_prompts, run_to_completion
from tests.helpers.tiny_models import tiny_checkpoint

FAMILIES = ["llama", "gpt2", "mpt", "gemma3_text"]  # grouped heads, learned positions, ALiBi, some layers that slide


class Lists:
    """A model that keeps [position, key, value, masses] of every token in a list for each layer and kv head."""

    def __init__(self, family: str, rank: str, **chosen: Any):
        self.model = models.build(Weights(tiny_checkpoint(family), torch.float32))
        self.spec: ModelSpec = self.model.spec
        self.kept = [[[] for _ in range(self.spec.num_kv_heads)] for _ in range(self.spec.num_layers)]
        self.full = [i for i, w in enumerate(self.spec.windows) if w is None]
        chosen = {"budget": 40, "recent": 12, "sinks": 0, "interval": 1, "chunk": 0, **chosen}
        self.budget, self.recent, self.sinks, self.interval, self.chunk = (
            chosen.pop(n) for n in ("budget", "recent", "sinks", "interval", "chunk")
        )
        self.rank, self.chosen, self.pos, self.prompt, self.expected, self.seed = rank, chosen, torch.zeros(0), 0, 1, 0
        self.due = self.shift = 0  # fresh tokens are numbered so far below their place

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        s, o = self.spec, torch.zeros_like(q)
        R = s.num_heads // s.num_kv_heads
        for g, kept in enumerate(self.kept[layer]):
            kept += [[int(p), k[t, g], v[t, g], [0.0] * R] for t, p in enumerate(self.pos)]
            at = torch.tensor([e[0] for e in kept])
            keys, values = torch.stack([e[1] for e in kept]), torch.stack([e[2] for e in kept])
            for t, p in enumerate(self.pos.tolist()):
                seen = (at <= p) & (at > p - (s.windows[layer] or 10**9))
                fade = self.chosen.get("damping", 0.0 if self.rank == "tova" else 1.0)
                for r in range(R):
                    x = s.scale * keys @ q[t, g * R + r]
                    if s.alibi_slopes:
                        x = x + s.alibi_slopes[g * R + r] * (at - p)
                    x = x.masked_fill(~seen, -torch.inf)
                    o[t, g * R + r] = x.softmax(0) @ values
                    for e, y in zip(kept, self.leaves(x, at, layer, g, p).tolist(), strict=True):
                        e[3][r] = e[3][r] * fade + y
        return o

    def leaves(self, x: Tensor, at: Tensor, layer: int, g: int, p: int) -> Tensor:
        """What a query at p with scores x leaves on the tokens at these positions."""
        numbered, p = p, p + self.shift
        if self.rank == "reread" and p < self.prompt and "mix" not in self.chosen:
            return torch.zeros_like(x)
        if self.rank == "snapkv" and p < self.prompt - self.chosen["queries"]:
            return torch.zeros_like(x)
        if self.rank != "keyformer":
            return x.softmax(0)
        tau = 1 + max(p - self.prompt + 1, 0) / self.expected
        step = torch.tensor(numbered if self.chosen["anew"] else -1)
        return ((x + sample_noise(GUMBEL, noise_key(torch.tensor(self.seed), layer, g, step), at)) / tau).softmax(0)

    def masses(self, layer: int, g: int) -> list[list[float]]:
        """Of each token, each query head's."""
        layers = self.full if self.chosen.get("scope") == "shared" else [layer]
        norm = [float(e[2].norm()) if self.chosen.get("value") else 1.0 for e in self.kept[layer][g]]
        assert all([e[0] for e in self.kept[i][g]] == [e[0] for e in self.kept[layer][g]] for i in layers)
        each = [zip(*(self.kept[i][g][j][3] for i in layers), strict=True) for j in range(len(norm))]
        return [[sum(m) * n for m in masses] for masses, n in zip(each, norm, strict=True)]

    def likes(self, layer: int, g: int, free: list[int]) -> list[list[int]]:
        """Each query head's order of the free tokens."""
        masses = self.masses(layer, g)
        return [sorted(free, key=lambda j: -masses[j][r]) for r in range(len(masses[0]))]

    def scores(self, layer: int, g: int, free: list[int]) -> dict[int, float]:
        """Of each free token of a head, by its index."""
        kept, rank, heads = self.kept[layer][g], self.rank, self.chosen.get("heads", "kv-sum")
        if rank in ("window", "sinks"):
            return {j: kept[j][0] for j in free}
        if rank == "dilated":
            return {j: kept[j][0] - 10**6 * (kept[j][0] % 2) for j in free}
        if rank == "random":  # a number of its own for each layer, head and position
            rng, shape = torch.Generator().manual_seed(0), (len(self.full), self.spec.num_kv_heads)
            factor = 12.9898 + float(torch.rand(*shape, generator=rng, dtype=torch.float64)[self.full.index(layer), g])
            return {j: abs(math.fmod(math.sin((kept[j][0] + 1) * factor) * 43758.5453, 1)) for j in free}
        if rank == "knorm":
            return {j: -float(kept[j][1].norm()) for j in free}
        if rank == "keydiff":
            units = torch.stack([e[1] / e[1].norm() for e in kept])
            mean = units.mean(0)
            return {j: -float(units[j] @ mean / mean.norm()) for j in free}
        if heads in ("query", "union"):
            likes = self.likes(layer, g, free)
            return {j: -min(like.index(j) for like in likes) for j in free}
        masses = self.masses(layer, g)
        return {j: max(masses[j]) if heads == "kv-max" else sum(masses[j]) for j in free}

    def forget(self, now: int) -> None:
        for layer in set(range(self.spec.num_layers)) - set(self.full):
            for kept in self.kept[layer]:
                kept[:] = [e for e in kept if e[0] > now - self.spec.windows[layer]]
        share = self.chosen.get("share", "none")
        heads = [(layer, g) for layer in self.full for g in range(self.spec.num_kv_heads)]
        before = {h: list(self.kept[h[0]][h[1]]) for h in heads}
        begins = now == self.prompt - 1 and len(before[heads[0]]) > self.budget
        due = begins or now < self.prompt - 1 or now == self.due
        if not due or sum(map(len, before.values())) <= self.budget * len(heads):
            return
        free = {
            h: [j for j, e in enumerate(before[h]) if self.sinks <= e[0] <= now - self.shift - self.recent]
            for h in heads
        }
        scored = {h: self.scores(*h, free[h]) for h in heads}
        if begins:
            self.sizes = dict.fromkeys(heads, self.budget)
            if self.chosen.get("heads") == "union":
                for h in heads:
                    n = self.budget - len(before[h]) + len(free[h])  # of the free ones
                    each = {j for like in self.likes(*h, free[h]) for j in like[:n]}
                    self.sizes[h] = len(before[h]) - len(free[h]) + len(each)
            for group in {None if share == "all" else layer for layer, _ in heads} if share != "none" else ():
                mine = [h for h in heads if group in (None, h[0])]
                order = sorted((-y, -before[h][j][0], h) for h in mine for j, y in scored[h].items())
                firm = {h: len(before[h]) - len(free[h]) for h in mine}
                chosen = [h for _, _, h in order[: self.budget * len(mine) - sum(firm.values())]]
                self.sizes |= {h: firm[h] + chosen.count(h) for h in mine}
        for h in heads:
            gone = len(before[h]) - (self.sizes[h] if hasattr(self, "sizes") else self.budget)
            lowest = sorted(free[h], key=lambda j: (scored[h][j], before[h][j][0]))[:gone]
            self.kept[h[0]][h[1]] = [e for j, e in enumerate(before[h]) if j not in lowest]
        self.due = now + self.interval
        if self.chosen.get("positions"):
            self.renumber(now)

    def renumber(self, now: int) -> None:
        """Everybody gets the next number, and a key that was turned back."""
        for heads in self.kept:
            for kept in heads:
                for j, e in enumerate(kept):
                    for rope in self.model.ropes:
                        e[1] = rope.apply(e[1][None, None], rope.angles(torch.tensor([j - e[0]]), e[1].dtype))[0, 0]
                    e[0] = j
        self.shift = now + 1 - len(self.kept[0][0])

    def read_again(self, prompt: list[int], n: int) -> None:
        """The prompt's tokens follow it, n at a time, and are forgotten."""
        for i in range(0, self.prompt, n):
            self.pos = torch.arange(self.prompt, self.prompt + len(prompt[i : i + n]))
            self.model.forward(torch.tensor(prompt[i : i + n]), self.pos, self.attend)
            for heads in self.kept:
                for kept in heads:
                    kept[:] = kept[: self.prompt]

    @torch.inference_mode()
    def generate(self, prompt: list[int], n: int, expected: int, seed: int) -> list[int]:
        tokens, self.prompt, self.expected, self.seed = list(prompt), len(prompt), expected, seed
        fresh = tokens
        while self.chunk and len(fresh) > (n_fresh := self.chunk + self.budget * (fresh is tokens)):  # not the last
            self.pos = torch.arange(len(tokens) - len(fresh), len(tokens) - len(fresh) + n_fresh) - self.shift
            self.model.forward(torch.tensor(fresh[:n_fresh]), self.pos, self.attend)
            self.forget(int(self.pos[-1]) + self.shift)
            fresh = fresh[n_fresh:]
        while len(tokens) < self.prompt + n:
            self.pos = torch.arange(len(tokens) - len(fresh), len(tokens)) - self.shift
            x = self.model.forward(torch.tensor(fresh), self.pos, self.attend)
            fresh = [int(self.model.compute_logits(x[-1:]).argmax())]
            if len(tokens) == self.prompt and self.rank == "reread":
                self.read_again(tokens, self.chosen["rereads"])
            self.forget(len(tokens) - 1)
            tokens += fresh
        return tokens[self.prompt :]


def positions(engine: Engine, row: int, layer: int, g: int) -> set[int]:
    """Those in the slots of a head."""
    cache = engine.cache
    pages = torch.from_numpy(cache.tables.pages[row, layer, g, : cache.tables.counts[row, layer, g]]).long()
    return {p for p in cache.kv.pos[pages].flatten().tolist() if p >= 0}


def contents(engine: Engine, row: int, layer: int, g: int) -> Tensor:
    """Keys and values of a head's tokens in order, [n, 2, D]."""
    cache = engine.cache
    pages = torch.from_numpy(cache.tables.pages[row, layer, g, : cache.tables.counts[row, layer, g]]).long()
    pos = cache.kv.pos[pages].flatten()
    kv = torch.stack([x.flatten(0, 1) for x in cache.backend.read(cache.kv, pages)], 1)
    return kv[pos >= 0][pos[pos >= 0].argsort()]


CASES: dict[str, dict[str, Any]] = {
    "h2o:budget=40,interval=1": {"rank": "h2o"},
    "h2o:budget=40,interval=7,sinks=3,recent=10": {"rank": "h2o", "recent": 10, "sinks": 3, "interval": 7},
    "h2o:budget=40,interval=1,damping=0.9": {"rank": "h2o", "damping": 0.9},
    "h2o:budget=40,interval=5,value=norm": {"rank": "h2o", "value": 1, "interval": 5},
    "h2o:budget=40,interval=5,heads=kv-max": {"rank": "h2o", "heads": "kv-max", "interval": 5},
    "h2o:budget=40,interval=5,heads=query": {"rank": "h2o", "heads": "query", "interval": 5},
    "h2o:budget=24,recent=7,interval=5,heads=union": {
        **{"rank": "h2o", "heads": "union", "interval": 5},
        **{"budget": 24, "recent": 7},
    },
    "h2o:budget=40,interval=5,scope=shared": {"rank": "h2o", "scope": "shared", "interval": 5},
    "h2o:budget=40,interval=5,share=layer": {"rank": "h2o", "share": "layer", "interval": 5},
    "h2o:budget=40,interval=5,share=all": {"rank": "h2o", "share": "all", "interval": 5},
    "keyformer:budget=40,interval=1": {"rank": "keyformer", "anew": 1},
    "keyformer:budget=40,interval=5,redraw=once": {"rank": "keyformer", "anew": 0, "interval": 5},
    "tova:budget=40,interval=1": {"rank": "tova"},
    "snapkv:budget=40,interval=4,queries=16": {"rank": "snapkv", "queries": 16, "interval": 4},
    "reread:budget=40,interval=3,rereads=30": {"rank": "reread", "interval": 3, "rereads": 30},
    "reread:budget=40,interval=3,share=all,mix=h2o,value=norm": {
        **{"rank": "reread", "interval": 3, "rereads": 1024},
        **{"share": "all", "mix": 1, "value": 1},
    },
    "knorm:budget=40,interval=3": {"rank": "knorm", "interval": 3},
    "keydiff:budget=40,interval=3": {"rank": "keydiff", "interval": 3},
    "knorm:budget=40,interval=3,share=all": {"rank": "knorm", "interval": 3, "share": "all"},
    "sinks:budget=40,interval=3": {"rank": "sinks", "sinks": 4, "interval": 3},
    "dilated:budget=40,interval=3": {"rank": "dilated", "interval": 3},
    "window:budget=40,interval=1": {"rank": "window"},
    "random:budget=40,interval=2": {"rank": "random", "interval": 2},
    "h2o:budget=40,interval=3,positions=new": {"rank": "h2o", "interval": 3, "positions": "new"},
    "keyformer:budget=40,interval=1,positions=new,recent=25%": {
        **{"rank": "keyformer", "anew": 1, "recent": 10, "positions": "new"},
    },
    "h2o:budget=30,prefill=stream,chunk=13,positions=new": {
        **{"rank": "h2o", "budget": 30, "recent": 9, "interval": 16, "chunk": 13, "positions": "new"},
    },
    "h2o:budget=30,prefill=stream,chunk=13": {"rank": "h2o", "budget": 30, "recent": 9, "interval": 16, "chunk": 13},
    "keyformer:budget=30,prefill=stream,chunk=25": {
        **{"rank": "keyformer", "anew": 1, "budget": 30},
        **{"recent": 9, "interval": 16, "chunk": 25},
    },
}


@pytest.mark.parametrize("policy", CASES)
@pytest.mark.parametrize("family", FAMILIES)
def test_lists_keep_the_same_tokens(family: str, policy: str) -> None:
    plain = Lists(family, **CASES[policy])
    if "positions" in CASES[policy] and any(plain.spec.windows):
        with pytest.raises(ValueError, match="window"):
            make_engine(family).add(make_request([1], 1, policy))
        return
    engine = make_engine(family, score_columns=plain.spec.num_heads // plain.spec.num_kv_heads)
    asked = make_request([7 * i % 128 for i in range(70)], 201, policy)
    want = plain.generate(asked.prompt, 200, 201, asked.noise_seed)
    engine.add(asked)
    while len(asked.output_tokens) < 200:
        engine.step()
    assert asked.output_tokens == want
    for layer, heads in enumerate(plain.kept):
        for g, kept in enumerate(heads):
            if plain.spec.windows[layer] is None:
                ours, theirs = positions(engine, asked.row, layer, g), {e[0] for e in kept}
                if (
                    plain.spec.alibi_slopes and plain.rank == "keydiff"
                ):  # keys of equal tokens are equal, but for rounding
                    assert {asked.tokens[p] for p in ours} == {asked.tokens[p] for p in theirs}
                    continue
                assert ours == theirs
                assert_close(contents(engine, asked.row, layer, g), torch.stack([torch.stack(e[1:3]) for e in kept]))


BUDGETS = [n for n in policies.names() if n not in ("full", "ring")]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", BUDGETS)
def test_a_budget_that_holds_everything_is_full(name: str, family: str) -> None:
    asked = random_prompts(4, max_prompt_len=60)
    assert go(family, asked, f"{name}:budget=200") == go(family, asked, "full")
    assert go(family, asked, f"{name}:budget=90,interval=1") == go(family, asked, "full")


def go(family: str, asked: list[list[int]], *chosen: str, backend: str = "cpu") -> list[list[int]]:
    """Answers of 30 tokens, of requests that run together; policies in turn."""
    return run_to_completion(
        make_engine(family, backend=backend),
        [make_request(p, 30, chosen[i % len(chosen)]) for i, p in enumerate(asked)],
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_policies_that_must_agree(family: str) -> None:
    asked = [p for p in random_prompts(20, max_prompt_len=150) if len(p) > 60][:3]
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
    asked = random_prompts(4, max_prompt_len=25)
    assert go(family, asked, "window:budget=32,interval=1") == go(family, asked, "ring:window=33")


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_company_of_any_policy_changes_nothing(family: str, backend: str) -> None:
    chosen = ["h2o:budget=30", "full", "keyformer:budget=50%,interval=2", "ring:window=20", "tova:budget=20"]
    params = [SamplingParams(temperature=0, ignore_eos=True, seed=i) for i in range(5)]
    texts = [p for p in random_prompts(30, max_prompt_len=150) if len(p) > 40][:5]

    def ask(i: int) -> Request:
        return make_request(texts[i], 30, chosen[i], params[i])

    together = run_to_completion(make_engine(family, backend=backend), [ask(i) for i in range(5)])
    assert together == [run_to_completion(make_engine(family, backend=backend), [ask(i)])[0] for i in range(5)]


def test_what_is_forgotten_comes_back_as_pages() -> None:
    engine, asked = (
        make_engine("llama", page_size=16),
        make_request([i % 128 for i in range(120)], 150, "h2o:budget=40,interval=8"),
    )
    engine.add(asked)
    engine.step()
    heads = 3 * 2
    after = engine.cache.total_pages - engine.cache.free_pages
    assert after == heads * 3  # 40 slots
    while len(asked.output_tokens) < 149:
        engine.step()
        assert engine.cache.total_pages - engine.cache.free_pages == heads * 3  # 48 slots
        engine.cache.check()


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_prompt_of_one_step_is_whole_in_one_layer_at_a_time(family: str, backend: str) -> None:
    """The same tokens in memory that could never hold all of it; company or not."""
    asked, chosen = [p for p in random_prompts(30, max_prompt_len=150) if len(p) > 120][:2], "h2o:budget=20,interval=4"
    exact = [
        run_to_completion(make_engine(family, backend=backend, max_batched_tokens=100), [make_request(p, 30, chosen)])[
            0
        ]
        for p in asked
    ]
    probe = make_engine(family, max_batched_tokens=256).cache
    policy = probe.effective_policy(make_request(max(asked, key=len), 30, chosen).policy)
    pages = probe.pages_needed(policy, 200, 150)
    assert pages < probe.pages_needed(policy.with_options(prefill="exact"), 200, 150)
    for made in ([asked[0]], asked):
        engine = make_engine(family, backend=backend, max_batched_tokens=256, num_pages=pages * len(made))
        requests = [make_request(p, 30, chosen) for p in made]
        assert run_to_completion(engine, requests) == exact[: len(made)]
        assert all(r.policy.prefill == "layers" for r in requests)


def test_a_prompt_longer_than_memory_streams_through_its_budget() -> None:
    """300 tokens in pages for 64: refused as a whole, and computed chunk by chunk without ever owning more."""
    heads, chosen = 3 * 2, "h2o:budget=40,interval=8"
    text = [7 * i % 128 for i in range(300)]
    engine = make_engine("llama", num_pages=heads * 4, max_batched_tokens=24, max_running_requests=4)
    with pytest.raises(ValueError, match="pages"):
        engine.add(make_request(text, 40, chosen))
    asked = make_request(text, 40, f"{chosen},prefill=stream,chunk=24")
    assert (
        len(run_to_completion(engine, [asked])[0]) == 40
        and max(asked.stats.peak_slots) == 64
        and max(asked.stats.final_slots) == 48
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_streaming_what_fits_is_full(family: str) -> None:
    asked = random_prompts(4, max_prompt_len=60)
    full = run_to_completion(make_engine(family), [make_request(p, 20) for p in asked])
    streamed = run_to_completion(
        make_engine(family, max_batched_tokens=24, max_running_requests=8),
        [make_request(p, 20, "h2o:budget=90,prefill=stream,chunk=24") for p in asked],
    )
    assert streamed == full


@pytest.mark.parametrize("family", ["llama", "mpt"])
@pytest.mark.parametrize("share", ["none", "all"])
def test_budgets_shrink_before_anybody_is_preempted(family: str, share: str) -> None:
    """One that keeps everything grows; the others give way down to their floors, and are right to the end."""
    asked = [p for p in random_prompts(40, seed=8) if len(p) > 100][:5]
    chosen = f"h2o:budget=60%,interval=4,share={share}"

    def go(shrink: str, pages: int) -> list[Request]:
        engine = make_engine(family, backend="cpu", num_pages=pages)
        made = [make_request(asked[0], 300), *(make_request(p, 260, chosen + shrink) for p in asked[1:])]
        run_to_completion(engine, made)
        return made

    # So many that all fit at first, and that the first cannot grow as it wants.
    shape = make_engine(family).cache.spec
    pages = 40 * len(shape.windows) * shape.kv_heads
    stiff, giving = go("", pages), go(",shrink=16", pages)
    assert sum(r.stats.num_preemptions for r in stiff) and not sum(r.stats.num_preemptions for r in giving)
    assert stiff[0].output_tokens == giving[0].output_tokens == go("", 10_000)[0].output_tokens
    assert min(max(r.stats.final_slots) for r in giving[1:]) < max(max(r.stats.final_slots) for r in stiff[1:])


@pytest.mark.parametrize(
    "chosen", ["h2o:budget=50%", "h2o:budget=480", "reread:budget=50%", "tova:budget=9,prefill=stream"]
)
@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3_text"])
def test_texts_may_fill_the_context(family: str, chosen: str) -> None:
    """However many spare slots a policy asks for: none lies beyond the table."""
    for n, interval in ((505, 16), (505, 5000), (511, 1), (500, 7)):
        asked = make_request([i % 128 for i in range(n)], 513 - n, f"{chosen},interval={interval}")
        assert len(run_to_completion(make_engine(family, backend="cpu"), [asked])[0]) == 513 - n
