"""Law 2: chunk size, batch company, preemption and resumption change no token.

Law 1: ring(W) == full with a window mask.
"""

import dataclasses

import pytest
import torch

from retain import kernels
from retain.kv import capacity
from retain.kv.capacity import CapacityPlanner
from retain.kv.memory import cache as memory_cache
from retain.sampling_params import SamplingParams
from tests.helpers.engines import make_engine, make_request, random_prompts, run_alone, run_to_completion
from tests.helpers.tiny_models import CONFIGS, tiny_model

FAMILIES = sorted(CONFIGS)
BACKENDS = [
    n for n in ("cpu", "reference") if kernels.import_backend(n).unavailable_reason() is None
]  # others: test_device.py


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "policy",
    [
        "full",
        "ring:window=24",
        "h2o:budget=40,prefill=stream,chunk=30",
        "reread:budget=50,rereads=40",
        "h2o:budget=25%",  # in one step layer by layer
    ],
)
def test_chunk_size_changes_no_token(family, policy):
    prompt = random_prompts(1, seed=3)[0] + random_prompts(1, seed=4)[0]
    whole = run_alone(family, prompt, policy=policy, max_batched_tokens=400)
    for max_batched_tokens in (65, 97):
        assert run_alone(family, prompt, policy=policy, max_batched_tokens=max_batched_tokens) == whole


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("family", ["llama", "gemma3_text", "mpt"])
def test_company_changes_no_token(family, backend):
    asked = random_prompts(10, seed=1)
    policies = ["full", "ring:window=20", "ring:window=50"]
    together = run_to_completion(
        make_engine(family, backend=backend), [make_request(p, 12, policies[i % 3]) for i, p in enumerate(asked)]
    )
    for i, (prompt, answer) in enumerate(zip(asked, together, strict=True)):
        assert run_alone(family, prompt, policy=policies[i % 3], backend=backend) == answer


TWINS = [
    "reread:budget=400,rereads=50",
    "h2o:budget=40",
    "full",
    "h2o:budget=25%,share=layer",
    "window:budget=30",
    "reread:budget=30,rereads=50",
]
TWINS += ["reread:budget=60", "ring:window=20", "reread:budget=20,rereads=50,value=norm", "knorm:budget=50%", "full"]


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "mpt"])
@pytest.mark.parametrize("pages", [100_000, 500])
def test_equal_prompts_are_computed_once_and_nobody_notices(family, pages):
    """Whatever their policies, and where the first of them is cancelled, preempted or ends early."""
    first, second = ([p for p in random_prompts(30, seed=3) if len(p) > 100][i] for i in (0, 1))
    texts = [first, second] * len(TWINS)
    policies = [p for p in TWINS for _ in (0, 1)]
    lengths = [1 if i in (8, 9) else 20 + i for i in range(len(texts))]
    want = [run_alone(family, p, n, backend="cpu", policy=q) for p, n, q in zip(texts, lengths, policies, strict=True)]
    engine = make_engine(family, backend="cpu", num_pages=pages, max_batched_tokens=90)
    asked = [make_request(p, n, q) for p, n, q in zip(texts, lengths, policies, strict=True)]
    engine.add(*asked)
    steps = 0
    while engine.has_unfinished_requests:
        engine.step()
        engine.cache.check()
        steps += 1
        if steps == 6:
            for r in list(engine.scheduler.running)[:2]:
                engine.scheduler.preempt(r)
        if steps == 1:
            engine.cancel(asked[0])
    assert [r.output_tokens for r in asked[1:]] == want[1:]
    assert engine.cache.free_pages == engine.cache.total_pages


def test_an_equal_prompt_costs_no_computation():
    engine = make_engine("llama", max_batched_tokens=100)
    asked = [
        make_request([1, 2, 3] * 50, 5, p) for p in ("h2o:budget=20", "h2o:budget=90", "full", "window:budget=50%")
    ]
    engine.add(*asked)
    engine.step()
    engine.step()
    assert all(len(r.output_tokens) == 1 for r in asked)  # 150 tokens in two steps of 100
    with pytest.raises(ValueError, match="pages"):
        small = make_engine("llama", num_pages=30)
        small.add(make_request([1, 2], 5), make_request([1] * 100, 5))
    assert not small.has_unfinished_requests


@pytest.mark.parametrize(("family", "pages"), [("llama", 190), ("gemma3_text", 60), ("gpt2", 400)])
def test_sixty_four_requests_with_preemption(family, pages):
    asked = random_prompts(64, seed=2, max_prompt_len=120)
    plenty = [run_alone(family, p, 30, backend="cpu") for p in asked]
    assert run_to_completion(make_engine(family, backend="cpu"), [make_request(p, 30) for p in asked]) == plenty
    few = [make_request(p, 30) for p in asked]
    assert run_to_completion(make_engine(family, backend="cpu", num_pages=pages), few) == plenty
    assert sum(r.stats.num_preemptions for r in few) > 0


@pytest.mark.parametrize(
    "policy",
    [
        "h2o:budget=40,interval=5",
        "keyformer:budget=30%",
        "reread:budget=30%,rereads=40",
        "tova:budget=9,prefill=stream,chunk=20",
    ],
)
@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gpt2"])
def test_who_was_preempted_forgets_again_as_it_did(family, policy):
    """The answer so far is computed many tokens at a time, but never past a moment of forgetting."""
    asked = [p for p in random_prompts(20, seed=2) if len(p) > 60][:4]
    params = SamplingParams(temperature=0, ignore_eos=True, seed=3)
    undisturbed = run_to_completion(
        make_engine(family, backend="cpu"), [make_request(p, 60, policy, params) for p in asked]
    )
    engine, again = (
        make_engine(family, backend="cpu", max_batched_tokens=70),
        [make_request(p, 60, policy, params) for p in asked],
    )
    for r in again:
        engine.add(r)
    for step in range(10**6):
        if not engine.has_unfinished_requests:
            break
        engine.step()
        if step % 31 == 30 and step < 140:
            for r in list(engine.scheduler.running):
                engine.scheduler.preempt(r)
    assert [r.output_tokens for r in again] == undisturbed and all(r.stats.num_preemptions for r in again)


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "mpt", "gpt2"])
def test_ring_is_full_with_a_window_mask(family, monkeypatch):
    """A ring gives what a model with that window in every layer gives from a cache that forgets nothing."""
    W, prompt = 24, random_prompts(1, seed=5, max_prompt_len=150)[0] + [7] * 40
    spec = tiny_model(family).spec
    masked = run_without_forgetting(monkeypatch, family, tuple(min(w or W, W) for w in spec.windows), prompt)
    assert run_alone(family, prompt, 40, policy=f"ring:window={W}") == masked
    assert run_alone(family, prompt, 40) == run_without_forgetting(monkeypatch, family, spec.windows, prompt)
    assert run_alone(family, prompt, 40) != masked


def run_without_forgetting(monkeypatch, family, windows, prompt):
    """Every layer keeps every slot; windows only hide."""
    engine = make_engine(family)
    model = engine.runner.model
    engine.runner.model = dataclasses.replace(model, spec=dataclasses.replace(model.spec, windows=windows))
    seen = torch.tensor([w or kernels.api.NO_WINDOW for w in windows])
    unbounded = (seen * 0 + 2**30).numpy().astype("int32")
    with monkeypatch.context() as patch:
        patch.setattr(CapacityPlanner, "windows", lambda self, policy: seen.numpy().astype("int32"))
        for module in (capacity, memory_cache):
            patch.setattr(module, "ring_capacities", lambda windows, fresh, page_size: unbounded)
        return run_to_completion(engine, [make_request(prompt, 40)])[0]


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_a_budget_of_the_whole_length_is_full(family):
    prompt = random_prompts(1, seed=6)[0]
    assert run_alone(family, prompt, policy="ring:window=400") == run_alone(family, prompt)
