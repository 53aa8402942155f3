"""Run random schedules, and compare each request with the same request alone in an engine of its own.

What may differ is documented: a budget that shrank keeps less (docs/guide/policies.md); accepted drafts add no mass,
and `draft` and `self` sample with other random numbers (docs/guide/speculation.md). Until then nothing may.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from retain.engine import drafters
from retain.engine.cache_interface import RequestRow
from retain.engine.drafters import Drafter, DrafterNeeds, TargetModel
from retain.engine.engine import Engine
from retain.engine.request import FinishReason, Logprob, Request
from retain.engine.spec_decode.draft_length import DraftLengthController
from retain.kv.eviction import policies
from retain.kv.eviction.policy import EvictionPolicy
from tests.helpers.backend_variants import use_isa
from tests.helpers.engines import make_engine, row_of
from tests.helpers.ranks import end_workers
from tests.helpers.schedules import PlannedRequest, Schedule
from tests.helpers.tiny_models import has_experts

MAX_STEPS = 2000


@dataclass(frozen=True)
class Answer:
    """The tokens of an answer, the log-probabilities of those that were asked for, and logits [n, V] that were read."""

    tokens: list[int]
    logprobs: list[Logprob]
    logits: Tensor


@dataclass(frozen=True)
class Difference:
    """What is not as it should be: of request `index`, or of the whole schedule where it is None."""

    index: int | None
    description: str


@dataclass
class RandomLengths(DraftLengthController):
    """Draft lengths that depend on a seed and not on the time that steps take."""

    rng: random.Random = field(default_factory=lambda: random.Random(0))

    def choose_lengths(self, draft_limits: Sequence[tuple[Request, int]], batch_size: int) -> list[tuple[Request, int]]:
        """Draw a length for all requests of the round."""
        length = self.rng.choice([0, 1, 2, 3, self.max_draft_tokens])
        return [(r, min(n, length)) for r, n in draft_limits]


@dataclass
class WatchedDrafter:
    """Another drafter; `drafted` collects the requests that it drafted for.

    Of drafts for greedy requests a share `error_rate` is replaced by random tokens.
    """

    drafter: Drafter
    error_rate: float
    drafted: set[Request] = field(default_factory=set)
    rng: random.Random = field(default_factory=lambda: random.Random(0))

    @property
    def k(self) -> str:
        return self.drafter.k

    @property
    def needs(self) -> DrafterNeeds:
        return self.drafter.needs

    @property
    def max_draft_tokens(self) -> int:
        return self.drafter.max_draft_tokens

    def attach(self, target: TargetModel) -> None:
        self.drafter.attach(target)

    def remove_request(self, request: Request) -> None:
        self.drafter.remove_request(request)

    def propose(self, draft_limits: Sequence[tuple[Request, int]], rows: Mapping[Request, RequestRow]) -> None:
        """Let the other drafter propose, note for whom it did, and replace a share of the drafts."""
        self.drafter.propose(draft_limits, rows)
        for request, _ in draft_limits:
            if request.drafts:
                self.drafted.add(request)
            if request.draft_probs is None:
                request.drafts = [
                    self.rng.randrange(128) if self.rng.random() < self.error_rate else t for t in request.drafts
                ]


class ScheduleRun:
    """One run of a schedule: its requests, and how many tokens of each must be those of the request alone.

    `depth`: pending steps of the engine.
    """

    def __init__(self, schedule: Schedule, path: Path, depth: int = 1):
        self.schedule = schedule
        self.path = path
        self.folder = path  # of the tiers
        self.depth = depth
        self.requests = {i: r.build() for i, r in enumerate(schedule.requests)}
        self.comparable: dict[Request, int] = defaultdict(lambda: 10**9)
        self.refused: set[int] = set()
        self.logits: dict[Request, list[Tensor]] = defaultdict(list)  # that requests read
        self.counts = Counter[str]()  # of what happened, for a summary
        self.num_loaded = 0
        self.num_reused = 0

    def run(self) -> None:
        """Run all engines, one after the other. Raises AssertionError where the accountant does not balance."""
        with use_isa(self.schedule.isa):
            for number in range(len(self.schedule.restarts) + 1):
                self._run_engine(number)

    def _run_engine(self, number: int) -> None:
        s = self.schedule
        engine = self._make_engine()
        todo = {i: r for i, r in enumerate(s.requests) if r.engine == number}
        arrivals: dict[int, list[int]] = defaultdict(list)
        for i, planned in todo.items():
            arrivals[planned.arrives_at].append(i)
        last_step = s.restarts[number] if number < len(s.restarts) else MAX_STEPS
        rng = random.Random(s.seed)
        for step in range(last_step):
            if step in arrivals:
                self._add(engine, arrivals.pop(step))
            for i, planned in todo.items():
                if planned.cancelled_at == step and i not in self.refused:
                    engine.cancel(self.requests[i])
            if step in s.preemptions and engine.scheduler.running:
                engine.scheduler.preempt(rng.choice([*engine.scheduler.running]))
            if engine.has_unfinished_requests:
                self._step(engine)
            elif not arrivals:
                break
        else:
            assert number < len(s.restarts), f"after {MAX_STEPS} steps some requests have not ended"
        for i in todo:
            if not self.requests[i].finish_reason and i not in self.refused:
                engine.cancel(self.requests[i])
        engine.cache.check()
        assert engine.cache.free_pages == engine.cache.total_pages, "pages are lost"
        prefix = engine.cache.prefix_cache
        self.num_reused += getattr(prefix, "num_reused_tokens", 0)
        self.num_loaded += sum(n for store, n in prefix.hits_by_source().items() if store != "pool")
        prefix.close_offloader()
        end_workers(engine)

    def planned_lengths(self) -> Iterator[tuple[EvictionPolicy, int]]:
        """Yield the resolved policy of each request, and the tokens that it computes."""
        for request in self.requests.values():
            yield request.policy, len(request.prompt) + request.input.max_tokens - 1

    def _make_engine(self) -> Engine:
        s = self.schedule
        limits: dict[str, Any] = {
            "max_batched_tokens": s.max_batched_tokens,
            "snapshot_interval": s.snapshot_interval,
            "max_running_requests": s.max_running_requests,
        }
        head = drafters.parse(s.drafter) if s.drafter.startswith(("mtp", "eagle3")) else None  # its layer takes pages
        sizes = make_engine(**s.engine_options, **limits, num_pages=1, drafter=head).cache
        needed = [1]
        for policy, length in self.planned_lengths():
            needed.append(sizes.pages_needed(sizes.planner.effective_policy(policy), length, length))
        drafter = WatchedDrafter(drafters.parse(s.drafter), s.draft_error_rate) if s.drafter else None
        engine = make_engine(
            **s.engine_options,
            **limits,
            num_pages=int(max(needed) * s.pool_factor),
            drafter=drafter,
            prefix_cache=s.prefix_cache,
            tiers=[spec.format(path=self.folder) for spec in s.tiers],
            offload_folder=str(self.folder) if s.offloads else "",
            num_resident=40 * (s.seed % 3 == 0 and s.offloads),  # else all
            num_ranks=s.num_ranks,
        )
        engine.depth = self.depth
        if drafter and drafter.k == "auto":
            lengths = RandomLengths(drafter.max_draft_tokens, rng=random.Random(s.seed))
            engine.speculator.length_controllers[""] = lengths
        return engine

    def _add(self, engine: Engine, indices: Sequence[int]) -> None:
        try:
            engine.add(*(self.requests[i] for i in indices))
        except ValueError:
            self.refused.update(indices)
            self.counts["refused"] += len(indices)

    def _step(self, engine: Engine) -> None:
        running = list(engine.scheduler.running)
        before = {r: (len(r.output_tokens), num_drafts(r)[1]) for r in running}
        evictors = {r: row_of(engine, r).evictors[0] for r in running if row_of(engine, r).evictors}
        for request, logits in engine.step().logits.items():
            self.logits[request].append(logits.clone())
        engine.cache.check()
        drafter = engine.speculator.default
        drafted = drafter.drafted if isinstance(drafter, WatchedDrafter) else set()
        for request, (num_tokens, num_accepted) in before.items():
            accepted = num_drafts(request)[1]
            if accepted > num_accepted and is_scored(request):
                self._compare_up_to(request, num_tokens + accepted - num_accepted + 1)
            if request in drafted and not request.params.greedy and self._samples_drafts:
                self._compare_up_to(request, num_tokens)
            if request in evictors and evictors[request].has_shrunk:
                self._compare_up_to(request, num_tokens)

    @property
    def _samples_drafts(self) -> bool:
        """Whether drafts are sampled, so that other numbers are drawn with them than without."""
        return self.schedule.drafter.startswith(("draft", "self", "assistant", "mtp", "eagle3"))

    def _compare_up_to(self, request: Request, num_tokens: int) -> None:
        self.comparable[request] = min(self.comparable[request], num_tokens)

    # ---- comparing -----------------------------------------------------------------------------------------------

    def differences(self) -> Iterator[Difference]:
        """Yield the requests that differ from themselves alone."""
        for i, request in self.requests.items():
            if i in self.refused:
                continue
            alone = run_alone(self.schedule, self.schedule.requests[i])
            n = min(self.comparable[request], len(request.output_tokens))
            self.counts["tokens_compared"] += n
            num_forced = len(request.input.forced_tokens)  # they have no log-probabilities
            if self.schedule.backend == "reference" and policies.name_of(request.policy) == "knorm":
                n = 0  # keys of equal tokens have equal norms but for rounding, which the batch decides there
            ended = request.finish_reason in (FinishReason.LENGTH, FinishReason.STOP)
            has_equal_end = not request.input.stop_ids or n == len(request.output_tokens)
            is_as_long = len(request.output_tokens) == len(alone.tokens)
            if ended != is_as_long and has_equal_end and not self.schedule.restarts:
                yield Difference(i, f"ended with {len(request.output_tokens)} of {len(alone.tokens)} tokens")
            found, expected = request.output_tokens[:n], alone.tokens[:n]
            if found != expected:
                at = next(k for k in range(n) if found[k] != expected[k])
                gap = describe_gap(alone, at - num_forced)
                yield Difference(i, f"token {at} is {found[at]}, not {expected[at]}{gap}")
                continue
            logprobs, others = (x[: max(n - num_forced, 0)] for x in (request.logprobs, alone.logprobs))
            if not self._agree(logprobs, others):
                yield Difference(i, describe_logprobs(logprobs, others))
            num_prompt_logits = len(request.prompt) - 1 if request.input.needs_prompt_logits else 0
            read = join_logits(self.logits[request])[: num_prompt_logits + n]
            if ended and n == len(request.output_tokens) and len(read) != len(alone.logits):
                yield Difference(i, f"read {len(read)} of {len(alone.logits)} logits")
            elif not torch.allclose(read, alone.logits[: len(read)], rtol=0, atol=self._largest_gap(1e-2)):
                yield Difference(i, "logits differ")

    @property
    def _has_equal_bits(self) -> bool:
        """Whether the backend computes a token to the same bits in any batch."""
        sums_by_rank = self.schedule.num_ranks > 1 and has_experts(self.schedule.family)
        return self.schedule.backend != "reference" and not sums_by_rank

    def _largest_gap(self, alone: float) -> float:
        """Return by how much numbers may differ; `alone`: where one rank computes them, and not to the same bits.

        Sums of other parts may be rounded to other numbers of few bits, and a fit of few slots multiplies a last bit.
        """
        if self._has_equal_bits:
            return 0
        return alone if self.schedule.num_ranks == 1 else 0.1

    def _agree(self, found: Sequence[Logprob], expected: Sequence[Logprob]) -> bool:
        if self._has_equal_bits:
            return found == expected
        most = self._largest_gap(1e-3)
        return all(abs(a.logprob - b.logprob) < most for a, b in zip(found, expected, strict=True))


def is_scored(request: Request) -> bool:
    """Return whether the policy ranks by mass."""
    return request.policy.query_weights(np.array([10**6], np.int32), 1) is not None


def num_drafts(request: Request) -> tuple[int, int]:
    """Return how many drafts a request has had, and how many of them were accepted."""
    stats = request.stats.spec_decode
    return sum(stats.num_drafted_per_position), sum(stats.num_accepted_per_position)


def join_logits(parts: Sequence[Tensor]) -> Tensor:
    """Return the rows of several logits, [n, V]."""
    return torch.cat([torch.empty(0, 128), *parts])


def describe_gap(alone: Answer, at: int) -> str:
    """Say how near the two likeliest tokens were."""
    if not alone.logprobs:
        return ""
    (_, first), (_, second) = alone.logprobs[at].top_logprobs[:2]
    return f" (the likeliest are {first - second:.2g} nats apart)"


def describe_logprobs(found: Sequence[Logprob], expected: Sequence[Logprob]) -> str:
    """Say where log-probabilities differ first, and by how much at most."""
    gaps = [abs(a.logprob - b.logprob) for a, b in zip(found, expected, strict=True)]
    at = next(i for i, (a, b) in enumerate(zip(found, expected, strict=True)) if a != b)
    return f"logprobs differ from token {at} on, by {max(gaps):.2g} at most"


_ALONE: dict[Any, Answer] = {}


def run_alone(schedule: Schedule, planned: PlannedRequest) -> Answer:
    """Return the answer to a request alone in an engine with pages for all of it, without prefixes and drafts."""
    options = schedule.engine_options
    alone = replace(
        planned, salt="", owner="", engine=0, arrives_at=0, cancelled_at=None, drafter_name="", explain_prefix=False
    )
    key = (schedule.isa, tuple(options.items()), alone)
    if key not in _ALONE:
        with use_isa(schedule.isa):
            engine = make_engine(**options, num_pages=4000, max_batched_tokens=600)
            request = alone.build()
            engine.add(request)
            logits = []
            while engine.has_unfinished_requests:
                logits += [x.clone() for x in engine.step().logits.values()]
                engine.cache.check()
        if len(_ALONE) > 500:
            _ALONE.clear()
        _ALONE[key] = Answer(request.output_tokens, request.logprobs, join_logits(logits))
    return _ALONE[key]
