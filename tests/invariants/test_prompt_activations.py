"""Activations of prompts in bfloat16: which tokens have them, and what depends on the option."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest
import torch
from torch import Tensor

from retain import LLM, SamplingParams, kernels
from retain.engine.drafters import parse as parse_drafter
from retain.engine.engine import Engine
from retain.engine.request import Request
from retain.kernels.api import Batch
from tests.helpers.engines import (
    AlwaysLoad,
    iter_steps,
    make_engine,
    make_request,
    random_prompts,
    record_logits,
    run_to_completion,
)
from tests.helpers.tiers import disk_spec

needs_cpu = pytest.mark.skipif(
    kernels.import_backend("cpu").unavailable_reason() is not None, reason="the cpu backend is not built"
)
OPTIONS = {"dtype": torch.bfloat16, "weights": "int4", "prompt_activations": "bfloat16"}
POLICIES = ["full", "h2o:budget=40", "reread:budget=40", "ring:window=24"]


class RecordingRunner:
    """Runs batches as another runner does, and records them with the length of each token's prompt."""

    hidden_states = None
    state_size = 0

    def __init__(self, engine: Engine):
        self.engine = engine
        self.inner = engine.runner
        self.steps: list[tuple[Batch, list[int]]] = []

    def forward(self, batch: Batch) -> Tensor:
        running = {row.index: r for r, row in self.engine.scheduler.running.items()}
        ends = {i: 2**30 if r.scoring else len(r.prompt) for i, r in running.items()}
        self.steps.append((batch, [ends[row] for row in batch.token_rows.tolist()]))
        return self.inner.forward(batch)


@pytest.mark.parametrize("drafter", ["", "ngram:k=4,min=1"])
def test_the_tokens_of_prompts_and_no_others_have_them(drafter: str) -> None:
    """In chunks beside requests that decode, after preemption, and in scoring passes."""
    engine = make_engine(
        "llama",
        num_pages=120,
        max_batched_tokens=20,
        max_running_requests=4,
        drafter=parse_drafter(drafter) if drafter else None,
        prompt_activations="bfloat16",
    )
    engine.runner = runner = RecordingRunner(engine)
    prompts = random_prompts(8, seed=3)
    requests = [make_request(p, 30, POLICIES[i % len(POLICIES)]) for i, p in enumerate(prompts)]
    for request in requests:
        engine.add(request)
    for step in iter_steps(engine):
        if step % 9 == 8 and len(engine.scheduler.running) > 1:
            engine.scheduler.preempt([*engine.scheduler.running][-1])
    kinds = set()
    for batch, ends in runner.steps:
        expected = (batch.positions < torch.tensor(ends)).tolist()
        in_bfloat16 = {t for begin, end in batch.bfloat16_rows for t in range(begin, end)}
        assert [t in in_bfloat16 for t in range(len(ends))] == expected
        kinds.add(frozenset(expected))
    assert engine.scheduler.num_preemptions and kinds == {frozenset(k) for k in ({True}, {False}, {True, False})}


@needs_cpu
def test_company_chunks_and_preemption_change_no_bit() -> None:
    prompts = random_prompts(6, seed=5)

    def make(**options: int) -> Engine:
        return make_engine("llama", backend="cpu", **OPTIONS, **options)  # type: ignore[arg-type]

    def requests_of(*chosen: int) -> list[Request]:
        return [make_request(prompts[i], 20, needs_logits=True) for i in chosen]

    engine = make(num_pages=90, max_batched_tokens=70)
    together = record_logits(engine, requests_of(*range(6)))
    assert engine.scheduler.num_preemptions
    for i in range(6):
        assert torch.equal(together[i], record_logits(make(), requests_of(i))[0])


@needs_cpu
def test_the_option_changes_prompts() -> None:
    def first_logits(**options: str) -> Tensor:
        engine = make_engine("llama", backend="cpu", dtype=torch.bfloat16, weights="int4", **options)  # type: ignore[arg-type]
        return record_logits(engine, [make_request(list(range(3, 40)), 1, needs_logits=True)])[0]

    assert not torch.equal(first_logits(), first_logits(prompt_activations="bfloat16"))


@needs_cpu
@pytest.mark.parametrize("drafter", ["ngram:k=5,min=1", "self:k=3,budget=48"])
def test_greedy_answers_do_not_depend_on_drafts(drafter: str) -> None:
    def run(**more: object) -> list[list[int]]:
        engine = make_engine("llama", backend="cpu", **OPTIONS, **more)  # type: ignore[arg-type]
        return run_to_completion(engine, [make_request(p, 40) for p in random_prompts(6, seed=2)])

    assert run(drafter=parse_drafter(drafter)) == run()


@needs_cpu
def test_a_store_of_other_activations_is_not_read(tmp_path: Path) -> None:
    params = SamplingParams(max_tokens=3, temperature=0, ignore_eos=True)

    def count_cached(activations: str) -> int:
        sizes = {"page_size": 16, "max_model_len": 512, "max_running_requests": 2, "kv_memory": "2MiB"}
        options = {"backend": "cpu", "prompt_activations": activations, "tier": disk_spec(tmp_path)}
        with closing(LLM("random:tiny", **sizes, **options)) as llm:  # type: ignore[arg-type]
            llm.cache.prefix_cache.offloader.cost_model = AlwaysLoad()
            return llm.generate(list(range(3, 103)), params)[0].cached_tokens

    found = [count_cached(a) for a in ("int8", "bfloat16", "int8", "bfloat16")]
    assert found[:2] == [0, 0] and min(found[2:]) > 90


def test_prompts_that_follow_each_other_are_one_range() -> None:
    engine = make_engine("llama", max_batched_tokens=128, prompt_activations="bfloat16")
    engine.runner = runner = RecordingRunner(engine)
    run_to_completion(engine, [make_request(list(range(3, 13)), 3), make_request(list(range(20, 35)), 3)])
    assert [list(batch.bfloat16_rows) for batch, _ in runner.steps] == [[(0, 25)], [], []]
