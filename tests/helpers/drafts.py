"""Laws of drafters that read hidden states of their target, for tests of each."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from retain.engine import drafters
from retain.engine.cache_interface import RequestRow
from retain.engine.drafters import Drafter
from retain.engine.request import Request
from retain.engine.runner import Runner
from retain.kernels import import_backend
from retain.kernels.api import Batch
from tests.helpers.engines import iter_steps, make_engine, make_request
from tests.helpers.schedule_runner import WatchedDrafter

PROMPT = [random.Random(3).randrange(128) for _ in range(60)]
POLICIES = [
    "full",
    "ring:window=24",
    "sinks:budget=40,interval=3",
    "h2o:budget=50%,interval=5,look=30",
    "look:slots=20",
]


class RecordingRunner:
    """Records the logits of another runner."""

    def __init__(self, runner: Runner):
        self.runner = runner
        self.logits: list[Tensor] = []

    def forward(self, batch: Batch) -> Tensor:
        self.logits.append(self.runner.forward(batch).clone())
        return self.logits[-1]

    @property
    def hidden_states(self) -> Tensor | None:
        return self.runner.hidden_states

    @property
    def state_size(self) -> int:
        """Numbers of the hidden state that each request brings into a batch."""
        return self.runner.state_size


@dataclass
class ExactDrafter(WatchedDrafter):
    """Another drafter, whose drafts are recorded with their text; a random number of them become the right ones."""

    error_rate: float = 0.0
    answers: dict[tuple[int, ...], list[int]] = field(default_factory=dict)  # by prompt
    found: list[tuple[list[int], list[int]]] = field(default_factory=list)

    def propose(self, draft_limits: Sequence[tuple[Request, int]], rows: Mapping[Request, RequestRow]) -> None:
        self.drafter.propose(draft_limits, rows)
        for request, _ in draft_limits:
            self.found.append((list(request.tokens), list(request.drafts)))
            n = self.rng.randint(0, len(request.drafts))
            rest = self.answers[tuple(request.prompt)][request.num_output_tokens :]
            request.set_drafts([*rest[:n], *request.drafts[n:]][: len(request.drafts)])


def record_drafts(found: list[list[int]]) -> Callable[..., None]:
    """Return a `Request.set_drafts` that keeps the drafts of each round in a list."""
    set_drafts = Request.set_drafts

    def record(request: Request, tokens: list[int], draft_probs: Tensor | None = None) -> None:
        found.append(list(tokens))
        set_drafts(request, tokens, draft_probs)

    return record


def check_draft_logits(
    family: str, spec: str, backend: str, length: int, compute: Callable[[list[int], int], tuple[list[int], Tensor]]
) -> None:
    """Compare the first four drafts behind a prompt, computed in one step and in chunks, with an oracle's.

    `compute(prompt, k)` returns the target's next token and k drafts, and the logits of these [k, V].
    """
    if reason := import_backend(backend).unavailable_reason():
        pytest.skip(reason)
    tokens, expected = compute(PROMPT[:length], 4)
    for max_batched_tokens in (128, 7):
        drafter = drafters.parse(spec)
        engine = make_engine(
            family, backend=backend, drafter=drafter, max_batched_tokens=max_batched_tokens, max_running_requests=1
        )
        drafter._runner = runner = RecordingRunner(drafter._runner)  # type: ignore[attr-defined]
        request = make_request(PROMPT[:length], 8)
        engine.add(request)
        while not request.output_tokens:
            engine.step()
        assert request.output_tokens == tokens[:1]
        engine.step()
        torch.testing.assert_close(torch.cat(runner.logits[:4]), expected, rtol=2e-3, atol=2e-3)


def check_greedy_and_hits(family: str, spec: str, backend: str, kv_dtype: torch.dtype | None = None) -> None:
    """Compare greedy tokens and prefix hits with those of plain decoding.

    In company of other policies, behind prefixes of any length, and where requests are preempted.
    """
    if reason := import_backend(backend).unavailable_reason():
        pytest.skip(reason)
    num_tokens = 8 if backend == "triton" else 30  # the interpreter is slow

    def run(drafter: Drafter | None) -> list[Request]:
        engine = make_engine(
            family, backend=backend, kv_dtype=kv_dtype, looks=True, prefix_cache="exact", drafter=drafter
        )
        done = []
        for turn in range(2):
            prompts = [[*PROMPT[: 60 - 7 * i * turn], *[5, i, 9][: 3 * turn]] for i in range(5)]
            requests = [make_request(p, num_tokens, policy) for p, policy in zip(prompts, POLICIES, strict=True)]
            engine.add(*requests)
            for step in iter_steps(engine):
                if step == num_tokens // 4:
                    engine.scheduler.preempt(next(iter(engine.scheduler.running)))
            engine.cache.check()
            done += requests
        return done

    plain = run(None)
    drafted = run(drafters.parse(spec))
    assert [r.output_tokens for r in drafted] == [r.output_tokens for r in plain]
    assert [r.stats.num_cached_tokens for r in drafted] == [r.stats.num_cached_tokens for r in plain]
    assert any(r.stats.num_cached_tokens for r in plain) and sum(r.stats.num_preemptions for r in drafted)
    assert sum(sum(r.stats.spec_decode.num_drafted_per_position) for r in drafted) > 3 * num_tokens * ("k=" in spec)


def check_drafts_follow(family: str, spec: str, backend: str, **options: Any) -> None:
    """Compare the drafts of a text with those that it gets alone.

    Behind accepted and rejected drafts, in company, after preemption, with equal prompts, and behind hits.
    """
    prompts = [PROMPT[:n] for n in (20, 33, 47, 33, 60, 20)]

    def run(drafter: Drafter | None, **more: Any) -> list[list[int]]:
        engine = make_engine(family, backend=backend, drafter=drafter, **options, **more)
        requests = [make_request(p, 25) for p in prompts]
        engine.add(*requests)
        for step in iter_steps(engine):
            if step in (4, 9, 13):
                engine.scheduler.preempt(next(iter(engine.scheduler.running)))
        return [r.output_tokens for r in requests]

    plain = run(None)
    answers = {tuple(p): a for p, a in zip(prompts, plain, strict=True)}
    drafter = ExactDrafter(drafters.parse(spec), answers=answers)
    assert run(drafter, max_running_requests=4) == plain
    assert len(drafter.found) > 50
    for tokens, drafted in drafter.found[::3]:
        again = ExactDrafter(drafters.parse(spec), answers={tuple(tokens[:-1]): [0] * 9})
        alone = make_engine(family, backend=backend, drafter=again)
        request = make_request(tokens[:-1], 9)
        alone.add(request)
        alone.step()
        assert request.output_tokens == tokens[-1:]
        alone.step()
        assert again.found[0][1][: len(drafted)] == drafted
