"""Conversations under a budget in one row that stays open between two requests: the other side of the law of resuming.

    one_row = OneRow(engine)
    one_row.ask(turn.with_text(text))           one turn after the other; each text begins with the last one's
    answer_after(options, spoken, last)         the answer to a request after these ones

The row goes on in the pages that it has, so nothing here looks into a prefix tree, a snapshot or a tier.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

from retain.engine.engine import Engine
from retain.engine.request import Logprob, Request, RequestInput
from retain.kv.checkpoints.budget.checkpoint import BudgetCheckpoint
from retain.kv.checkpoints.budget.resumption import plan_resumption
from retain.kv.eviction.policy import EvictionPolicy
from retain.kv.prefix.start import Begun, Start
from retain.kv.row import Row
from retain.kv.row_task import RowTask
from retain.kv.stats.request import RequestMemory
from retain.sampling_params import SamplingParams
from tests.helpers.adapters import find_adapter
from tests.helpers.engines import make_engine

Positions = list[list[list[int]]]
STEP_TOKENS = 16  # a step has room for a page: so many tokens fit into shrunk rings


class OneRow:
    """An engine whose row stays open between two requests of a conversation."""

    def __init__(self, engine: Engine):
        self.engine = engine
        self.positions: list[Positions] = []
        self.row: Row | None = None
        self.num_computed = 0
        engine.scheduler._close_row = self.keep_row  # type: ignore[method-assign]
        open_row = engine.cache.open
        engine.cache.open = lambda *args: self.continue_row(args[0]) or open_row(*args)  # type: ignore[method-assign]

    def keep_row(self, request: Request) -> RequestMemory:
        """End a request without its row."""
        self.row = cast(Row, self.engine.scheduler.running.pop(request))
        self.num_computed = request.num_computed_tokens
        self.positions.append(self.row.positions())
        return RequestMemory([], [], 0)

    def continue_row(self, policy: Any) -> Row | None:
        """Let the row go on under the policy of another request, in the pages that it has."""
        row = self.row
        p = self.num_computed
        if row is None:
            return None
        parts = tuple(e.capture_state(p) for e in row.evictors)
        groups = tuple(g for g, t in enumerate(row.groups) if len(t.full_layers(row.index)))
        state = BudgetCheckpoint(p, row.evictors[0].policy, parts, groups, None)
        plan = plan_resumption(state, policy, state.evictors)
        assert plan
        for tables in row.groups:
            tables.allocated_upto[row.index] = p  # the next policy may want more slots behind the same tokens
        row.policy = policy
        row.open_evictors(plan.policy)
        for evictor, part, slots in zip(row.evictors, state.evictors, plan.slots, strict=True):
            evictor.resume(part, plan, slots)

        def start(task: RowTask, _: Start) -> Begun:
            row.task = task
            return Begun(p)

        row.start = start  # type: ignore[method-assign]
        return row

    def run(self, request: Request, num_computed: int) -> None:
        """Run a request until so many tokens are computed, and no further."""
        self.engine.add(request)
        while request.finish_reason is None and request.num_computed_tokens < num_computed:
            missing = num_computed - request.num_computed_tokens
            self.engine.scheduler.max_batched_tokens = min(STEP_TOKENS, max(missing, 1))
            self.engine.step()
            self.engine.cache.check()
        self.engine.cancel(request)
        assert self.num_computed == num_computed


@dataclass(frozen=True)
class Spoken:
    """A request of a conversation under a resolved policy, and its answer as far as it is known.

    The row goes on after `num_computed` tokens of prompt and answer.
    """

    prompt: tuple[int, ...]
    answer: tuple[int, ...]
    max_tokens: int
    policy: EvictionPolicy
    params: SamplingParams
    num_system_tokens: int = 0
    num_computed: int = 0
    adapter: str = ""

    def build(self) -> Request:
        """Make a request whose answer begins with the known one."""
        return Request(
            RequestInput(
                prompt=list(self.prompt),
                params=self.params,
                policy=self.policy,
                max_tokens=self.max_tokens,
                forced_tokens=list(self.answer),
                num_system_tokens=self.num_system_tokens,
                adapter=find_adapter(self.adapter, self.prompt),
            )
        )


def answer_after(options: dict[str, Any], spoken: Sequence[Spoken], last: Spoken) -> tuple[list[int], list[Logprob]]:
    """Return the answer to `last` in the row of these requests: all tokens, and log-probabilities of the unknown ones.

    `options` are arguments of `make_engine`.
    """
    engine = make_engine(**options, max_batched_tokens=STEP_TOKENS, max_running_requests=4)
    one_row = OneRow(engine)
    for s in spoken:
        one_row.run(s.build(), s.num_computed)
    request = last.build()
    one_row.run(request, len(last.prompt) + last.max_tokens - 1)
    return request.output_tokens, request.logprobs
