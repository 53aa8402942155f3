"""Random conversations: chats in turns, with edits, branches, repeated prompts, other salts and other policies.

    draw_conversations(7)     the seventh schedule; equal seeds give equal ones

The prompt of a turn is the text of an earlier one as far as it keeps it, prompt and answer, and new tokens. So prompts
are known only when the schedule runs: see tests/helpers/conversation_runner.py.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from retain.kv.eviction.policy import EvictionPolicy
from retain.sampling_params import SamplingParams
from tests.helpers.schedules import (
    MAX_MODEL_LEN,
    TIERS,
    PlannedRequest,
    PolicyLimits,
    Schedule,
    draw_adapters,
    draw_params,
    draw_policy,
    draw_schedule,
    parse_policy,
    policy_limits,
)
from tests.helpers.sink_family import SINKS
from tests.helpers.unlike_family import UNLIKE

SLIDING_FAMILIES = ("gemma3_text", "mistral", "qwen2", SINKS, UNLIKE)
MAX_TEXT = MAX_MODEL_LEN - 100  # tokens: scoring passes need room behind them
MAX_TURNS = 14  # of all chats
KINDS = ("next", "next", "next", "next", "edit", "branch", "again", "salt", "policy")


@dataclass(frozen=True)
class Turn(PlannedRequest):
    """A request that goes on from turn `parent` (-1: from none), and arrives so many steps after that has ended.

    `number` names the turn. `prompt` is what it adds to the first tokens of the parent's text: all but `num_dropped`.
    """

    number: int = 0
    parent: int = -1
    num_dropped: int = 0

    def with_text(self, text: Sequence[int]) -> PlannedRequest:
        """Return a request with the whole prompt, where `text` is the parent's prompt and answer."""
        kept = text[: max(len(text) - self.num_dropped, 0)]
        fields = {name: getattr(self, name) for name in PlannedRequest.__dataclass_fields__}
        return PlannedRequest(**fields | {"prompt": (*kept, *self.prompt)})

    @property
    def resolved_policy(self) -> EvictionPolicy:
        """The policy as the turn has it, for a prompt of any length."""
        return parse_policy(self.policy)


def draw_conversations(
    seed: int, backends: Sequence[str] = ("cpu", "reference"), families: Sequence[str] = ()
) -> Schedule:
    """Draw a schedule of conversations. Arguments as in `draw_schedule`."""
    rng = random.Random(f"conversations {seed}")
    schedule = draw_schedule(seed, backends, families or rng.choice([(), SLIDING_FAMILIES]))
    tiers = rng.choice(TIERS) if rng.random() < 0.5 else ()
    restarts = tuple(rng.randint(5, 120) for _ in range(rng.choice([0, 1, 2, 3]))) if tiers else ()
    turns = tuple(draw_turns(rng, policy_limits(schedule)))
    return replace(
        schedule,
        prompt_activations="int8",  # else an answer that a later prompt computes again has other last bits
        prefix_cache="exact:keep=prompt" if rng.random() < 0.05 else "exact",
        pool_factor=rng.choice([1.0, 1.2, 1.5, 2.0, 3.0, 6.0, 20.0]),
        drafter=schedule.drafter if rng.random() < 0.3 else "",
        preemptions=schedule.preemptions if rng.random() < 0.5 else (),
        snapshot_interval=rng.choice([0, 16, 16, 40, 96, 2048]),
        tiers=tiers,
        restarts=restarts,
        kills=tuple(i for i in range(len(restarts)) if rng.random() < 0.5),
        requests=tuple(without_activation(turn) for turn in draw_adapters(seed, turns)),
    )


def without_activation(turn: Turn) -> Turn:
    """Return a turn whose adapter has no beginning, where it has a budget: states before it are of other adapters."""
    is_unlike = turn.adapter == "activated" and turn.resolved_policy.has_budget
    return replace(turn, adapter="") if is_unlike else turn


def draw_turns(rng: random.Random, limits: PolicyLimits) -> list[Turn]:
    """Draw the turns of some chats, which share first tokens, policies and salts."""
    alphabet = rng.choice([128, 128, 9])
    begin = [rng.randrange(alphabet) for _ in range(rng.choice([0, 20, 48, 90]))]
    budgets = [draw_budget(rng, limits) for _ in range(2)]
    specs = rng.choice([["full", draw_policy(rng, limits)], budgets[:1], budgets, ["full", *budgets]])
    turns: list[Turn] = []
    lengths: list[int] = []  # of prompts and answers
    for _ in range(rng.randint(3, MAX_TURNS)):
        kind = rng.choice(KINDS) if turns else "first"
        before = rng.choice(turns[-4:]) if turns else None
        added = tuple(rng.randrange(alphabet) for _ in range(rng.choice([1, rng.randint(1, 20), rng.randint(1, 60)])))
        turn = Turn(
            prompt=added,
            max_tokens=rng.choice([1, 2, rng.randint(3, 40), rng.randint(3, 40)]),
            policy=rng.choice(specs),
            params=SamplingParams(temperature=0, ignore_eos=True, logprobs=2, seed=rng.choice([0, 0, 0, 1])),
            salt=rng.choice(["", "", "", "a"]),
            num_system_tokens=rng.choice([0, 0, 3, 16]),
            turn_end=(0, 0, 17, 64)[len(added) % 4],
            drafter_name=rng.choice(["", "", "", "off"]),
            explain_prefix=rng.random() < 0.1,
            number=len(turns),
            arrives_at=rng.choice([0, 0, 0, rng.randint(1, 20)]),
            cancelled_at=rng.randint(0, 50) if rng.random() < 0.08 else None,
        )
        if before is None or rng.random() < 0.15:
            turn = replace(turn, prompt=(*begin, *added), arrives_at=rng.randint(0, 30))
        else:
            turn = go_on(rng, turn, before, kind, lengths[before.number])
            if kind == "salt":
                turn = replace(turn, salt=rng.choice(["b", "a", ""]))
            if kind == "policy":
                turn = replace(turn, policy=rng.choice(specs))
        if not parse_policy(turn.policy).has_budget and rng.random() < 0.4:
            turn = replace(turn, params=replace(draw_params(rng), logprobs=2))
        length = len(turn.prompt) + (lengths[turn.parent] - turn.num_dropped if turn.parent >= 0 else 0)
        if length + turn.max_tokens <= MAX_TEXT:
            lengths.append(length + turn.max_tokens)
            turns.append(turn)
    return turns


def draw_budget(rng: random.Random, limits: PolicyLimits) -> str:
    """Draw a policy with a budget."""
    while not parse_policy(spec := draw_policy(rng, limits)).has_budget:
        pass
    return spec


def go_on(rng: random.Random, turn: Turn, before: Turn, kind: str, length: int) -> Turn:
    """Let a turn go on from another of its chat, whose text has so many tokens, in one of KINDS."""
    same = replace(
        turn,
        policy=before.policy,
        salt=before.salt,
        num_system_tokens=before.num_system_tokens,
        params=replace(turn.params, seed=before.params.seed),
    )
    if kind == "again":
        return replace(same, prompt=before.prompt, parent=before.parent, num_dropped=before.num_dropped)
    num_dropped = rng.randrange(length) if kind == "edit" else rng.choice([0] * 9 + [1])
    return replace(same, parent=before.number, num_dropped=num_dropped)
