"""Law 4 for budgets in tiers: a conversation whose state went to a tier and back equals one that was never paused."""

from __future__ import annotations

import shutil
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest

from retain.engine.engine import Engine
from retain.engine.request import Request
from tests.helpers.engines import make_engine
from tests.helpers.marks import slow
from tests.helpers.tiers import disk_spec, offloader_of
from tests.helpers.unlike_family import UNLIKE
from tests.helpers.unlike_family import unlike_family as unlike_family
from tests.invariants.test_resuming import (
    POLICIES,
    Positions,
    answers,
    ask,
    options_of,
    record_positions,
    talk,
    talk_in_one_row,
)

FAMILIES = ["gemma3_text", *slow("llama", "mpt")]
H2O = "h2o:budget=25%"
Conversation = tuple[list[list[int]], list[Positions]]


class Pauses:
    """An engine whose pool is emptied between two requests: `kind` says how. What it has lies in `path`."""

    def __init__(self, kind: str, path: Path, **options: Any):
        self.kind = kind
        self.path = path
        self.options = options
        self.num_pauses = 0
        self.engine = self.open()

    def open(self) -> Engine:
        """Open an engine on what the last one left."""
        tier = disk_spec(self.path / str(self.num_pauses if self.kind == "killed" else 0))
        if self.kind == "ram":
            tier = "ram:capacity=100MB"
        elif self.kind == "remote":
            tier = f"remote:url=file://{self.path}/kv,refresh=0.01"
        engine = make_engine(prefix_cache="exact", tiers=[tier], max_running_requests=4, **self.options)
        for store in offloader_of(engine).stores:
            store.sync()
        return engine

    def pause(self) -> None:
        """Empty the pool."""
        tree = self.engine.cache.prefix_cache.tree
        tree.evict(tree.num_evictable_pages)
        assert not tree.num_evictable_pages
        offloader_of(self.engine).sync()
        self.num_pauses += 1
        if self.kind == "killed":  # the folder as it is now, with the log of SQLite
            shutil.copytree(self.path / str(self.num_pauses - 1), self.path / str(self.num_pauses))
        if self.kind in ("restart", "killed", "remote"):
            self.close()
            self.engine = self.open()

    def close(self) -> None:
        """Close the tiers."""
        self.engine.cache.prefix_cache.close_offloader()


def talk_with_pauses(policy: str, pauses: Pauses) -> tuple[list[Request], list[Positions]]:
    """Hold a conversation, with a pause behind each turn."""
    positions: list[Positions] = []

    def answer(text: list[int], policy: str) -> Request:
        found = record_positions(pauses.engine)
        request = ask(pauses.engine, text, policy)
        positions.append(found[-1])
        pauses.pause()
        return request

    return talk(policy, answer), positions


@cache
def expected_conversation(policy: str, family: str) -> Conversation:
    """Return the answers of a conversation in one row, and the positions at the end of each turn."""
    turns, positions = talk_in_one_row(policy, **options_of(family, policy))
    return answers(turns), positions


@pytest.mark.parametrize("kind", ["ram", "restart", *slow("disk", "killed", "remote")])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("policy", POLICIES)
def test_conversation_with_pauses_equals_one_row(kind: str, family: str, policy: str, tmp_path: Path) -> None:
    """The same tokens and positions; only new tokens are computed; what was read is in the statistics."""
    pauses = Pauses(kind, tmp_path, **options_of(family, policy))
    found, positions = talk_with_pauses(policy, pauses)
    assert (answers(found), positions) == expected_conversation(policy, family)
    known = [len(r.tokens) - 1 for r in found[:-1]]
    assert [r.stats.num_cached_tokens for r in found[1:]] == known
    if kind in ("ram", "disk"):
        hits = pauses.engine.cache.prefix_cache.hits_by_source()
        assert hits == {"pool": 0, kind: sum(known)}
    stats = offloader_of(pauses.engine).stats()
    assert all(0 < t["bytes"] <= t["capacity"] for t in stats)
    pauses.close()


@pytest.mark.parametrize("policy", ["h2o:budget=30%,prefill=stream,chunk=24", *slow("h2o:budget=50%,share=layer")])
def test_unlike_layers_resume_from_a_tier(policy: str, unlike_family: None, tmp_path: Path) -> None:
    """Groups of layers whose pages differ in slots go on together."""
    expected = talk(policy, partial(ask, make_engine(prefix_cache="exact", **options_of(UNLIKE, policy))))
    found, _ = talk_with_pauses(policy, Pauses("restart", tmp_path, **options_of(UNLIKE, policy)))
    assert answers(found) == answers(expected)
    assert [r.stats.num_cached_tokens for r in found] == [r.stats.num_cached_tokens for r in expected]
