"""Run random conversations, and compare each turn with what it must equal.

Without a budget a turn equals itself alone, in a cold cache. With one, a turn that goes on from what an earlier turn
kept equals that conversation in one row that stays open (tests/helpers/one_row.py): `Lineage` lists its requests. More
than one lineage may lead to the same text; a turn equals one of them. What may differ besides is in schedule_runner.py.
"""

from __future__ import annotations

import random
import shutil
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from retain.engine.engine import Engine
from retain.engine.request import FinishReason, Logprob, Request
from retain.kv.eviction.policy import EvictionPolicy
from retain.kv.prefix.start import Start
from retain.kv.row import Row
from retain.kv.stats.request import RequestMemory
from tests.helpers.backend_variants import use_isa
from tests.helpers.conversations import Turn
from tests.helpers.engines import row_of
from tests.helpers.one_row import Spoken, answer_after
from tests.helpers.ranks import end_workers
from tests.helpers.schedule_runner import Difference, ScheduleRun, is_scored, num_drafts, run_alone
from tests.helpers.schedules import PlannedRequest, Schedule

Lineage = tuple[Spoken, ...]
COLD: Lineage = ()
UNKNOWN: Lineage = ()  # in place of the lineages of a text, none of which is empty
MAX_LINEAGES = 8  # of one text; with more of them its turns are not compared


@dataclass(frozen=True)
class Segment:
    """What a request computed from one admission on: from `num_cached` tokens, `num_answered` of the answer known.

    It equals one of the `lineages`; None where that is not known.
    """

    num_answered: int
    num_cached: int
    lineages: frozenset[Lineage] | None


@dataclass
class Attempt:
    """A turn that was sent to an engine: once, or again after a restart."""

    turn: Turn
    planned: PlannedRequest  # with the whole prompt
    request: Request
    cancelled_at: int | None  # step of its engine
    together: list[Request] = field(default_factory=list)  # that were added at once
    segments: list[Segment] = field(default_factory=list)


class ConversationRun(ScheduleRun):
    """One run of a schedule of conversations. `counts` tell what it met."""

    def __init__(self, schedule: Schedule, path: Path, depth: int = 1):
        super().__init__(replace(schedule, requests=()), path, depth)
        self.schedule = schedule
        self.turns = [turn for turn in schedule.requests if isinstance(turn, Turn)]
        self.attempts: dict[Request, Attempt] = {}
        self.last: dict[int, Request] = {}  # the last attempt of each turn, by number
        self.lineages: dict[tuple[Any, ...], set[Lineage]] = defaultdict(set)  # by key and text
        self.texts: list[tuple[str, bytes, Request]] = []  # that a cache may have: salt, windows
        self.found: list[Difference] = []
        self.answers: dict[Lineage, tuple[list[int], list[Logprob]]] = {}
        self.folder = path / "0"

    def planned_lengths(self) -> Iterator[tuple[EvictionPolicy, int]]:
        """Yield each turn's policy and length. A turn that is cancelled makes the next ones shorter, never longer."""
        lengths: dict[int, int] = {}
        for turn in self.turns:
            kept = max(lengths[turn.parent] - turn.num_dropped, 0) if turn.parent in lengths else 0
            n = kept + len(turn.prompt)
            lengths[turn.number] = n + turn.max_tokens
            yield turn.resolved_policy.resolve(n, turn.num_system_tokens), n + turn.max_tokens - 1

    # ---- running -------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Run all engines, one after the other. Raises AssertionError where the accountant does not balance."""
        self.folder.mkdir(mode=0o700, exist_ok=True)
        with use_isa(self.schedule.isa):
            for number in range(len(self.schedule.restarts) + 1):
                self._run_engine(number)
        self.requests = dict(enumerate(self.attempts))

    def _run_engine(self, number: int) -> None:
        s = self.schedule
        engine = self._make_engine()
        self._watch(engine)
        last_step = s.restarts[number] if number < len(s.restarts) else 10**9
        rng = random.Random(s.seed)
        ended_at: dict[int, int] = {}  # step of this engine, by turn
        added: set[int] = set()
        step = 0
        while step < last_step:
            for number_of_turn, request in self.last.items():
                if request.finish_reason:
                    ended_at.setdefault(number_of_turn, step)
            if ready := [t for t in self.turns if t.number not in added and self._is_ready(t, step, ended_at)]:
                added |= {turn.number for turn in ready}
                self._add_turns(engine, ready, step)
            for request in self.last.values():
                if self.attempts[request].cancelled_at == step:
                    engine.cancel(request)
            if step in s.preemptions and engine.scheduler.running:
                engine.scheduler.preempt(rng.choice([*engine.scheduler.running]))
            if engine.has_unfinished_requests:
                self._step(engine)
            elif len(ended_at) == len(self.turns):
                break
            step += 1
            assert step < 5000, "some turns do not end"
        self._end_engine(engine, number)

    def _is_ready(self, turn: Turn, step: int, ended_at: dict[int, int]) -> bool:
        """Return whether a turn that was not added to this engine arrives now."""
        if turn.number in ended_at:
            return False
        if turn.parent in {t.number for t in self.turns}:
            return turn.parent in ended_at and step >= ended_at[turn.parent] + turn.arrives_at
        return step >= turn.arrives_at

    def _add_turns(self, engine: Engine, turns: Sequence[Turn], step: int) -> None:
        """Add turns that arrive together."""
        attempts = []
        for turn in turns:
            parent = self.last.get(turn.parent)
            planned = turn.with_text(parent.tokens if parent else ())
            cancelled_at = None if turn.cancelled_at is None else step + turn.cancelled_at
            attempts.append(Attempt(turn, planned, planned.build(), cancelled_at))
        requests = [a.request for a in attempts]
        for a in attempts:
            a.together = requests
            self.attempts[a.request] = a
            self.last[a.turn.number] = a.request
            self.counts["turns"] += 1
        try:
            engine.add(*requests)
        except ValueError:  # a scoring pass may need more room than there is
            self.counts["refused"] += len(requests)
            for request in requests:
                request.finish_reason = FinishReason.CANCELLED
        self.texts += [(*self._visibility(engine, request), request) for request in requests]

    def _end_engine(self, engine: Engine, number: int) -> None:
        """Close an engine, or copy its folder while it runs and take the copy."""
        is_last = number == len(self.schedule.restarts)
        next_folder = self.path / str(number + 1)
        if number in self.schedule.kills:
            self._copy_folder(next_folder)
            self.counts["kills"] += 1
        for request in [r for r in self.last.values() if not r.finish_reason]:
            engine.cancel(request)
            if not is_last:
                del self.last[self.attempts[request].turn.number]  # it is sent again
        engine.cache.check()
        assert engine.cache.free_pages == engine.cache.total_pages, "pages are lost"
        prefix = engine.cache.prefix_cache
        self.num_reused += getattr(prefix, "num_reused_tokens", 0)
        self.num_loaded += sum(n for store, n in prefix.hits_by_source().items() if store != "pool")
        prefix.close_offloader()
        end_workers(engine)
        if number in self.schedule.kills:
            self.folder = next_folder
        if not any("{path}" in spec for spec in self.schedule.tiers):
            self.texts.clear()
            self.lineages.clear()

    def _copy_folder(self, path: Path) -> None:
        """Copy what a process that is killed now leaves: whole files, and drafts of what it writes."""
        path.mkdir(mode=0o700)
        for file in sorted(self.folder.rglob("*")):
            target = path / file.relative_to(self.folder)
            with suppress(FileNotFoundError):  # it was deleted or renamed since
                if file.is_dir():
                    target.mkdir(parents=True, exist_ok=True)
                else:
                    target.parent.mkdir(parents=True, exist_ok=True)
                    shutil.copy2(file, target)

    # ---- watching ------------------------------------------------------------------------------------------------

    def _watch(self, engine: Engine) -> None:
        """Record what requests begin with, and what they leave."""
        scheduler = engine.scheduler
        start, close_row, start_forked = scheduler._start, scheduler._close_row, scheduler.start_forked

        def on_start(request: Request, row: Row, found: Start) -> None:
            start(request, row, found)
            self._check_source(engine, request)
            self._record_segment(request, row)

        def on_close(request: Request) -> RequestMemory:
            if not row_of(engine, request).has_failed:
                self._record_lineages(request)
            return close_row(request)

        def on_fork(request: Request, row: Row) -> None:
            start_forked(request, row)  # type: ignore[arg-type]
            leaders = [r for r in self.attempts[request].together if r.prompt == request.prompt]
            segments = [x for r in leaders for x in self.attempts[r].segments[-1:] if r is not request]
            found = [x.lineages for x in segments]
            known = None if None in found else frozenset({COLD}.union(*(x for x in found if x)))
            self.attempts[request].segments.append(Segment(0, len(request.prompt), known))
            self.counts["forks"] += 1

        scheduler._start = on_start  # type: ignore[method-assign, assignment]
        scheduler._close_row = on_close  # type: ignore[method-assign]
        scheduler.start_forked = on_fork  # type: ignore[method-assign, assignment]

    def _visibility(self, engine: Engine, request: Request) -> tuple[str, bytes]:
        return request.input.salt, engine.cache.planner.windows(request.policy).tobytes()

    def _check_source(self, engine: Engine, request: Request) -> None:
        """Check that no request begins with more than it has in common with a text of its salt and windows."""
        n = request.num_computed_tokens
        mine = self._visibility(engine, request)
        texts = [r for *key, r in self.texts if tuple(key) == mine]
        if not request.stats.num_preemptions:
            texts.remove(request)
        most = max((common(r.tokens, request.tokens) for r in texts), default=0)
        if n > most:
            self.found.append(
                Difference(self._index(request), f"began with {n} tokens of others, has {most} in common")
            )

    def _record_segment(self, request: Request, row: Row) -> None:
        """Record from which lineages a request goes on."""
        attempt = self.attempts[request]
        n = request.num_computed_tokens
        lineages: frozenset[Lineage] | None = frozenset()
        if not row.is_resumed or row.depends_on_text_alone:
            lineages = frozenset({COLD})
        if n and row.evictors:
            known = self.lineages.get((*self._key(request), tuple(request.tokens[:n])), set())
            lineages = None if UNKNOWN in known else lineages | {go_on_from(x, request, n) for x in known}
            if lineages is not None and not lineages:
                self.found.append(Difference(self._index(request), f"went on from {n} tokens that nobody has kept"))
                lineages = None
        if lineages is not None and len(lineages) > MAX_LINEAGES:
            lineages = None
        attempt.segments.append(Segment(request.num_output_tokens, n, lineages))
        self.counts["hits"] += n > 0
        self.counts["resumed"] += row.is_resumed
        self.counts["unknown"] += lineages is None

    def _record_lineages(self, request: Request) -> None:
        """Record the conversations that lead to the text of a request which ends or is preempted."""
        n = request.num_computed_tokens
        attempt = self.attempts[request]
        if not request.policy.resume_key or n < len(request.prompt) or n > len(request.tokens):
            return
        segment = attempt.segments[-1]
        key = (*self._key(request), tuple(request.tokens[:n]))
        has_gaps = num_drafts(request)[1] > 0 and is_scored(request)  # accepted drafts add no mass
        if has_gaps or segment.lineages is None:
            self.lineages[key].add(UNKNOWN)
        else:
            spoken = self._spoken(request, n)
            self.lineages[key] |= {(*lineage, spoken) for lineage in segment.lineages}

    def _spoken(self, request: Request, num_computed: int) -> Spoken:
        planned = self.attempts[request].planned
        answer = tuple(request.tokens[len(request.prompt) : num_computed + 1])
        policy = planned.build().policy
        return Spoken(
            planned.prompt,
            answer,
            planned.max_tokens,
            policy,
            planned.params,
            planned.num_system_tokens,
            num_computed,
            planned.adapter,
        )

    def _key(self, request: Request) -> tuple[Any, ...]:
        """Return what requests must have in common to go on from each other."""
        planned = self.attempts[request].planned
        system = planned.num_system_tokens if request.policy.modes.protect == "system" else 0
        seed = planned.params.seed if request.policy.uses_noise else None
        return planned.salt, planned.adapter, planned.policy, system, seed

    def _index(self, request: Request) -> int:
        """Return the place of a request's turn in the schedule."""
        return self.turns.index(self.attempts[request].turn)

    # ---- comparing -----------------------------------------------------------------------------------------------

    def differences(self) -> Iterator[Difference]:
        """Yield the turns that differ from themselves alone, or from the same conversation without a pause."""
        yield from self.found
        for request, attempt in self.attempts.items():
            if not request.policy.has_budget:
                expected = run_alone(self.schedule, attempt.planned)
                n = min(self.comparable[request], len(request.output_tokens))
                self.counts["tokens_compared"] += n
                why = self._compare(request, 0, n, expected.tokens, expected.logprobs)
                if why:
                    yield Difference(self._index(request), why)
                continue
            ends = [*(s.num_answered for s in attempt.segments[1:]), len(request.output_tokens)]
            for segment, end in zip(attempt.segments, ends, strict=False):  # none where it was never admitted
                end = min(end, self.comparable[request])
                if segment.lineages is None or end <= segment.num_answered:
                    continue
                why = self._compare_with_lineages(request, segment, end)
                if why:
                    yield Difference(self._index(request), why)
                    break

    def _compare_with_lineages(self, request: Request, segment: Segment, end: int) -> str:
        """Return how an answer differs from what follows each lineage; "" where it equals one of them."""
        begin = segment.num_answered
        last = self._spoken(request, len(request.prompt) + begin - 1)
        reasons = []
        assert segment.lineages is not None
        for lineage in sorted(segment.lineages, key=len):
            tokens, logprobs = self._answer_after(lineage, last)
            reasons.append(self._compare(request, begin, end, tokens, logprobs))
            if not reasons[-1]:
                self.counts["tokens_compared"] += end - begin
                self.counts["resumed_tokens_compared"] += (end - begin) * bool(lineage)
                return ""
        return f"{reasons[0]}; from {segment.num_cached} cached, {[len(x) for x in segment.lineages]} requests before"

    def _answer_after(self, lineage: Lineage, last: Spoken) -> tuple[list[int], list[Logprob]]:
        key = (*lineage, last)
        if key not in self.answers:
            with use_isa(self.schedule.isa):
                self.answers[key] = answer_after(self.schedule.engine_options, lineage, last)
        return self.answers[key]

    def _compare(
        self, request: Request, begin: int, end: int, tokens: Sequence[int], logprobs: Sequence[Logprob]
    ) -> str:
        """Compare a part of an answer; `logprobs` begin at `begin`."""
        found = request.output_tokens
        for k in range(begin, end):
            if k >= len(tokens) or found[k] != tokens[k]:
                return f"token {k} is {found[k]}, not {tokens[k] if k < len(tokens) else None}"
        if not self._agree(request.logprobs[begin:end], logprobs[: end - begin]):
            return f"logprobs of tokens {begin} to {end} differ"
        return ""


def common(a: Sequence[int], b: Sequence[int]) -> int:
    """Return the number of first tokens that two texts have in common."""
    n = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        n += 1
    return n


def go_on_from(lineage: Lineage, request: Request, num_computed: int) -> Lineage:
    """Return the lineage of a request that goes on from the state at the end of another.

    The answer of a request that was preempted goes on: that is as if there had been no pause.
    """
    return lineage[:-1] if num_computed >= len(request.prompt) else lineage
