"""The laws in small on a device that is not the CPU: the triton backend on a pretended one (tests/pretend.py).

Equal to the definition, and the host waits for nothing but tokens. On a GPU the same tests run on the GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from retain.desk import GenerateRequest

from retain import LLM, kernels
from retain.engine import drafters
from retain.engine.engine import Engine
from retain.engine.request import Request
from retain.kernels import triton
from retain.processing.grammar import grammar_from_lark
from retain.sampling_params import SamplingParams
from tests.helpers.engines import make_engine, make_request, run_to_completion
from tests.helpers.tiers import disk_spec as disk

pytestmark = pytest.mark.skipif(triton.unavailable_reason() is not None, reason=str(triton.unavailable_reason()))
GREEDY_SHORT = SamplingParams(temperature=0, ignore_eos=True, max_tokens=3)
GREEDY = SamplingParams(temperature=0, ignore_eos=True, seed=3)
TEXTS = [list(range(3, 3 + n)) for n in (17, 7, 20)]
TOKENS = "said"  # the function that brings a step's tokens


def far(work: Callable[[Callable[..., Engine]], Any]) -> tuple[Any, list[str]]:
    """What work gives, with engines there; and where the host waited for the device, but for tokens."""
    if not triton.is_interpreted():
        return work(
            lambda family, **more: make_engine(family, backend="triton", device=torch.device("cuda"), **more)
        ), []
    from tests.helpers.fake_device import DEVICE, FakeDevice

    def made(family: str, **more: Any) -> Engine:
        with there.allow_syncs():  # weights may take their time
            return make_engine(family, backend="triton", device=DEVICE, **more)

    with FakeDevice() as there:
        found = work(made)
    return found, [w for w in there.host_syncs if TOKENS not in w]


def steps(engine: Engine, made: Sequence[Request]) -> list[list[int]]:
    """Run them to the end. (The accountant would wait for nothing, but looking costs.)"""
    engine.add(*made)
    while engine.has_unfinished_requests:
        engine.step()
    engine.cache.check()
    return [r.output_tokens for r in made]


def same(family: str, policies: Sequence[str], n: int = 6, params: SamplingParams = GREEDY, **more: Any) -> None:
    def made() -> list[Request]:
        return [make_request(t, n, p, params) for t, p in zip(TEXTS, policies, strict=True)]

    want = run_to_completion(make_engine(family, backend="reference", **more), made())
    got, waits = far(lambda rig: steps(rig(family, **more), made()))
    assert got == want
    assert waits == []


@pytest.mark.parametrize("family", ["gemma3_text", "mpt"])
def test_families(family: str) -> None:
    same(family, ["full", "sinks:budget=12,interval=2", "ring:window=10"], n=3)


@pytest.mark.parametrize(
    "policies",
    [
        ["h2o:budget=12,interval=2", "keyformer:budget=6,interval=1", "snapkv:budget=6,interval=2"],
        ["tova:budget=9,interval=2,prefill=stream,chunk=8", "knorm:budget=6", "reread:budget=12"],
        ["random:budget=10", "dilated:budget=6,interval=2", "keydiff:budget=10,prefill=layers"],
    ],
)
def test_policies(policies: list[str]) -> None:
    same("llama", policies, n=3)


def test_chunks_and_preemption() -> None:
    same(
        "llama",
        ["full", "h2o:budget=12,interval=2", "ring:window=10"],
        n=3,
        pages=30,
        max_batched_tokens=16,
        max_running_requests=4,
    )


def test_heads_that_differ() -> None:
    """Budgets shared among heads are counted on the host, and so are new positions: there it has to wait."""
    policies = ["h2o:budget=10,share=layer,value=norm", "h2o:budget=8,share=all", "h2o:budget=8,positions=new"]
    want = run_to_completion(
        make_engine("llama", backend="reference"), [make_request(t, 3, p) for t, p in zip(TEXTS, policies, strict=True)]
    )
    got, _ = far(lambda rig: steps(rig("llama"), [make_request(t, 3, p) for t, p in zip(TEXTS, policies, strict=True)]))
    assert got == want


def test_sampled() -> None:
    """Every option, and the uniform numbers of the request: the tokens that the definition draws."""
    params = SamplingParams(temperature=0.8, top_k=20, top_p=0.9, min_p=0.01, repetition_penalty=1.2, seed=5,
                            presence_penalty=0.3, ignore_eos=True, logit_bias=((7, 2.0),))  # fmt: skip
    same("llama", ["full"] * 3, n=3, params=params)


@pytest.mark.parametrize(
    ("name", "temperature"),
    [("ngram:k=3,min=1", 0.0), ("ngram:k=3,min=1", 0.7), ("self:k=3,budget=16,refresh=1", 0.7)],
)
def test_drafts(name: str, temperature: float) -> None:
    text = [5, 6, 7, 8] * 12
    likely = tuple((t, 9.0) for t in text[:4])  # or there would be nothing to guess
    params = SamplingParams(temperature=temperature, ignore_eos=True, seed=4, logit_bias=likely)

    def go(engine: Engine) -> tuple[list[list[int]], int]:
        made = [make_request(text[i:], 5, params=params) for i in range(2)]
        return steps(engine, made), sum(sum(r.stats.spec_decode.num_drafted_per_position) for r in made)

    want = go(make_engine("llama", backend="reference", drafter=drafters.parse(name)))
    got, waits = far(lambda rig: go(rig("llama", drafter=drafters.parse(name))))
    assert got == want and got[1] > 0
    if temperature == 0:
        assert got[0] == go(make_engine("llama", backend="reference"))[0]
    assert {w.split()[1] for w in waits} <= {
        "verify:",
        "one:",
        "certain:",
        "_choose:",
    }  # tokens too, and what is looked at


@pytest.mark.parametrize(("family", "tier"), [("llama", "disk"), ("gemma3_text", "ram")])
def test_prefixes_and_tiers(family: str, tier: str, tmp_path: Path) -> None:
    """Cold, warm, and woken from memory or from a disk."""
    texts = [[*range(40), 3, 4], [*range(40), 9]]
    want = run_to_completion(make_engine(family, backend="reference"), [make_request(t, 3) for t in texts])

    def go(rig: Callable[..., Engine]) -> tuple[list[list[int]], int]:
        engine = rig(
            family, prefix="exact", tiers=[disk(tmp_path) if tier == "disk" else "ram:capacity=10MB"], pages=64
        )
        found = [steps(engine, [make_request(t, 3)])[0] for t in texts]
        tree = engine.cache.prefix_cache.tree
        tree.evict(tree.num_evictable_pages)
        engine.cache.prefix_cache.offloader.sync()
        again = make_request(texts[0], 3)
        found += steps(engine, [again])
        engine.cache.prefix_cache.close_offloader()
        return found, again.stats.num_cached_tokens

    (found, woken), _ = far(go)
    assert found == [*want, want[0]] and woken >= 32


def test_only_what_is_important(tmp_path: Path) -> None:
    text = [*range(60), 3, 4]
    want = run_to_completion(make_engine("llama", backend="reference"), [make_request(text, 2)])

    def go(rig: Callable[..., Engine]) -> list[list[int]]:
        engine = rig("llama", prefix="selective:ratio=1", tiers=[disk(tmp_path)])
        found = []
        for _ in range(3):  # computed, woken, woken from what was packed
            engine.cache.prefix_cache.tree.clear()
            found += steps(engine, [make_request(text, 2)])
            engine.cache.prefix_cache.offloader.sync()
        assert sum(engine.cache.prefix_cache.offloader.num_loaded_tokens.values()) > 60
        return found

    assert far(go)[0] == want * 3


def test_the_front_door(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several answers, log-probabilities, a form, scores and a draft model, as LLM gives them."""

    def go(**there: str) -> list[Any]:
        llm = LLM("random:tiny", dtype="float32", kv_memory="8MiB", max_running_requests=8, **there)
        params = SamplingParams(max_tokens=3, temperature=0.7, seed=1, n=2, logprobs=2, ignore_eos=True)
        drafts = LLM("random:tiny", dtype="float32", kv_memory="8MiB", speculate="draft:model=random:tiny,k=2", **there)
        answers = [*llm.generate("hello there", params), *drafts.generate([[5, 6, 7, 8] * 5], GREEDY_SHORT)]
        (form,) = llm.generate_from_requests(
            [
                GenerateRequest(
                    "x", SamplingParams(max_tokens=2, temperature=0), grammar=grammar_from_lark('start: "a" "b"')
                )
            ]
        )
        tops = [
            t for a in answers for p in a.logprobs or () for t in (p.token_id, *(token for token, _ in p.top_logprobs))
        ]
        scores = [round(x, 3) for x in llm.score([[5, 6, 7, 8]], [[9, 10]])[0]]
        return [[a.token_ids for a in answers], tops, form.text, scores]

    want = go(backend="reference", device="cpu")
    if triton.is_interpreted():
        from tests.helpers.fake_device import DEVICE, FakeDevice

        monkeypatch.setattr(triton, "DEVICES", (DEVICE.type,))
        monkeypatch.setattr(kernels, "resolve_device", lambda name: DEVICE)
        with FakeDevice():
            assert go(backend="triton") == want
    else:
        assert go(backend="triton", device="cuda") == want


def test_what_would_wait_is_seen() -> None:
    """The pretence itself: mixing is refused, and asking is written down."""
    if not triton.is_interpreted():
        pytest.skip("a GPU needs no pretence")
    from tests.helpers.fake_device import DEVICE, FakeDevice

    with FakeDevice() as there:
        x = torch.ones(3, device=DEVICE)
        assert x.device == DEVICE and there.host_syncs == []
        for wrong in (lambda: x + torch.ones(3), lambda: torch.cat((x, torch.ones(1))), lambda: x.numpy()):
            with pytest.raises((RuntimeError, TypeError)):
                wrong()
        assert there.host_syncs == []
        (x + 1).sum().tolist(), x[torch.tensor([0])], x[x > 0], x.cpu(), torch.ones(2).to(DEVICE)
        assert len(there.host_syncs) == 5
        torch.ones(2).to(DEVICE, non_blocking=True)
        assert len(there.host_syncs) == 5
