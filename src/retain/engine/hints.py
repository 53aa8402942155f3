"""Hints about a request's text, for its cache: see kv/hints.py."""

from __future__ import annotations

from dataclasses import dataclass

from retain.engine.request import Request
from retain.kv.manager import KVCacheManager
from retain.kv.row_task import RowTask
from retain.kv.text import Text

ACTIONS = ("retain", "release", "demote", "prefetch", "signal")

SOON_S = 1.0  # until a text is asked for that is loaded ahead, where nothing else is said


@dataclass(frozen=True)
class Hint:
    """What the cache should do with a text: one of ACTIONS, which callers name, or end_turn, for an answer in a chat.

    `seconds`: for how long it is retained, or after how many it is asked for (prefetch; signal: None, as the pauses of
    its `tool` say). `num_kept`: its first tokens that are not released, or those that the next turn begins with.
    """

    action: str
    seconds: float | None = None
    num_kept: int = 0
    tool: str | None = None  # that runs; "" for a user who speaks next


def carry_out(cache: KVCacheManager, hint: Hint, request: Request, text: Text, owner: str = "") -> int:
    """Do what a hint asks for with a text, which is computed as a request says. Returns the tokens that it is done to.

    Raises ValueError where nothing is cached, and for another action.
    """
    if not cache.prefix_cache.enabled:
        raise ValueError("prefix_cache=off keeps nothing: there is nothing to hint at")
    hints = cache.hints
    if hint.action != "signal":
        hints.end_loads(Text() if hint.action == "prefetch" else text)
    policy = cache.planner.effective_policy(request.policy)
    if hint.action == "retain":
        return hints.retain(policy, text, hint.seconds or 0.0, owner)
    if hint.action == "release":
        return hints.release(policy, text, hint.num_kept)
    if hint.action == "demote":
        return hints.demote(policy, text)
    if hint.action == "prefetch":
        task = RowTask(text, len(request.prompt), max_cached_tokens=len(text), seed=request.noise_seed)
        return hints.prefetch(policy, task, SOON_S if hint.seconds is None else hint.seconds)
    if hint.action == "signal":
        return len(text) if hints.expect(policy, text, owner, hint.tool, hint.seconds) else 0
    if hint.action == "end_turn":
        begin = request.input.turn_end or len(request.prompt)
        return hints.end_turn(policy, text, begin, hint.num_kept, owner, hint.tool)
    raise ValueError(f"unknown hint {hint.action!r}: choose {', '.join(ACTIONS)}")
