"""Replays recorded sessions in one engine, for the bench of sessions.

Sessions begin together. Each waits for its answer, pauses, and sends its next request. Their clock counts steps of the
engine, and skips pauses in which nothing runs: who runs beside whom is the same on every machine. Times are those of
the steps themselves. Answers are sampled token by token, but each token is the recorded one, so all methods see the
same texts.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from math import inf
from time import perf_counter, sleep

import torch
from torch import Tensor

from retain.engine.output import StepOutput
from retain.engine.request import FinishReason, Request
from retain.llm import LLM
from retain.processing.input import GenerateRequest
from retain.sampling_params import SamplingParams
from tools.agent_bench.hints import AgentHints
from tools.agent_bench.recording import Turn

STEP_SECONDS = 0.01  # of a pause in which nothing runs, for each step that it has room for
References = Mapping[tuple[int, int], Tensor]  # by session and turn: log-probabilities, float16 [answer, V]


class OutOfMemoryError(ValueError):
    """Raised for a turn that the engine's memory cannot hold."""


class ForcedAnswer:
    """The grammar that allows one answer (teacher forcing): a request samples its tokens, whatever is predicted."""

    def __init__(self, answer: Sequence[int]):
        self.answer = answer
        self.num_accepted = 0
        self.error = ""

    def mask_logits(self, logits: Tensor, drafts: Sequence[int]) -> None:
        """Forbid every token but the answer's next one, in place."""
        logits.fill_(-inf)
        logits[:, self.answer[self.num_accepted]] = 0

    def accept_token(self, token: int) -> bool:
        """Go one token further. Every token may follow."""
        self.num_accepted += 1
        return True

    @property
    def is_complete(self) -> bool:
        """Whether the answer was given to its end."""
        return self.num_accepted == len(self.answer)


@dataclass
class Distance:
    """How far the distributions before an answer's tokens are from the full cache's: sums over these tokens."""

    full: Tensor
    num_read: int = 0
    kl: float = 0.0
    num_agreed: int = 0  # tokens with the same likeliest one

    def read(self, logits: Tensor) -> None:
        """Read the logits [n, V] before the next n tokens."""
        log_p = self.full[self.num_read : self.num_read + len(logits)].float()
        log_q = logits.log_softmax(-1).half().cpu().float()  # rounded as the other is: equal ones have no distance
        self.num_read += len(logits)
        self.kl += float((log_p.exp() * (log_p - log_q)).sum())
        likeliest = logits.argmax(-1, keepdim=True).cpu()
        self.num_agreed += int((log_p.gather(-1, likeliest) == log_p.amax(-1, keepdim=True)).sum())


@dataclass
class TurnResult:
    """What a turn of a replay found, and how long it took."""

    session: int
    turn: int
    num_prompt: int
    num_known: int  # tokens of the prompt that the turn before has computed
    num_answer: int
    begin: float  # on the clock of the steps
    distance: Distance | None
    num_cached: int = 0
    num_preemptions: int = 0
    ttft_s: float | None = None

    @property
    def num_found(self) -> int:
        """Known tokens that were not computed again."""
        return min(self.num_cached, self.num_known)


def score_references(llm: LLM, sessions: Sequence[Sequence[Turn]]) -> dict[tuple[int, int], Tensor]:
    """Return the distributions that the engine, which should keep everything, has before the tokens of each answer."""
    found = {}
    for i, turns in enumerate(sessions):
        for t, turn in enumerate(turns):
            parts: list[Tensor] = []

            def read(_: int, logits: Tensor, parts: list[Tensor] = parts) -> None:
                parts.append(logits.log_softmax(-1).half().cpu())

            llm.score([turn.prompt], [turn.answer], logits_callback=read)
            found[i, t] = torch.cat(parts)
    return found


@dataclass
class Replay:
    """A replay of sessions in an engine, which begins with an empty prefix cache."""

    llm: LLM
    sessions: Sequence[Sequence[Turn]]
    references: References
    hints: AgentHints
    salt: str = ""
    results: list[TurnResult] = field(default_factory=list)
    seconds: float = 0.0  # of all steps
    _now: float = 0.0
    _rng: random.Random = field(default_factory=lambda: random.Random(0))
    _running: dict[Request, TurnResult] = field(default_factory=dict)
    _due: list[tuple[float, int, int]] = field(default_factory=list)  # a heap: when, session, turn
    _loads: list[tuple[float, int, Request]] = field(default_factory=list)  # the same of texts to be loaded

    def run(self) -> list[TurnResult]:
        """Run all turns of all sessions. Returns their results in the order of their ends. Raises OutOfMemoryError."""
        self._due = [(0.0, i, 0) for i in range(len(self.sessions))]
        self.llm.cache.prefix_cache.set_clock(lambda: self._now)
        while self._due or self._running:
            if not self._running:
                self._pause()
            self._load()
            while self._due and self._due[0][0] <= self._now:
                _, session, turn = heappop(self._due)
                self._submit(session, turn)
            started = perf_counter()
            output = self.llm.engine.step()
            self.seconds += perf_counter() - started
            self._now += self.hints.step_time
            self.llm.output_processor.process(output)
            self._collect(output, self._now)
        return self.results

    def _pause(self) -> None:
        """Skip a pause in which nothing runs, as long as steps would take; loads go on in it."""
        begin = self._now
        self._now = max(self._now, self._due[0][0])
        self._load()
        end = perf_counter() + (self._now - begin) / self.hints.step_time * STEP_SECONDS
        loading = self.llm.cache.hints.loading
        while perf_counter() < end and not all(p.row.load and p.row.load.is_done for p in loading.values()):
            sleep(0.001)

    def _load(self) -> None:
        """Have texts loaded whose time has come."""
        while self._loads and self._loads[0][0] <= self._now:
            started = perf_counter()
            self.hints.prefetch(self.llm.cache, heappop(self._loads)[2])
            self.seconds += perf_counter() - started

    def _submit(self, session: int, number: int) -> None:
        turns = self.sessions[session]
        turn = turns[number]
        full = self.references.get((session, number))
        distance = None if full is None else Distance(full)
        params = SamplingParams(max_tokens=len(turn.answer), temperature=0, ignore_eos=True, seed=0)
        generate_request = GenerateRequest(turn.prompt, params, salt=self.salt)
        try:
            (state,) = self.llm.input_processor.process(generate_request, distance.read if distance else None)
        except ValueError as error:
            raise OutOfMemoryError(str(error)) from error
        state.request.grammar = ForcedAnswer(turn.answer)
        self.llm.output_processor.add([state])
        num_known = turn.num_known(turns[number - 1] if number else None)
        self._running[state.request] = TurnResult(
            session, number, len(turn.prompt), num_known, len(turn.answer), self.seconds, distance
        )

    def _collect(self, output: StepOutput, now: float) -> None:
        for request, tokens in output.token_ids.items():
            result = self._running[request]
            if tokens and result.ttft_s is None:
                result.ttft_s = self.seconds - result.begin
            if request.finish_reason is None:
                continue
            if request.finish_reason is FinishReason.OUT_OF_MEMORY:
                raise OutOfMemoryError(f"a turn of {result.num_prompt} tokens got fewer pages than were planned")
            del self._running[request]
            result.num_cached = request.stats.num_cached_tokens
            result.num_preemptions = request.stats.num_preemptions
            self.results.append(result)
            turns = self.sessions[result.session]
            if result.turn + 1 < len(turns):
                following = result.turn + 1
                when = now + turns[following].pause
                heappush(self._due, (when, result.session, following))
                self.hints.leave(self.llm.cache, request, turns[following], self._rng)
                if self.hints.lead is not None:
                    heappush(self._loads, (when - self.hints.lead, request.id, request))
