"""Laws 2, 3 and 4 over snapshots: turns of random conversations equal themselves alone, or a chat without a pause.

Schedules (tests/helpers/conversations.py) mix chats in turns, edits, branches, repeated prompts, salts, budgets that
resume, small pools, tiers, and engines that are closed or killed. `python -m tools.fuzz --conversations` runs as many
as one likes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from retain.kernels import cpu
from tests.helpers.attention_case import torch_threads
from tests.helpers.conversation_runner import ConversationRun
from tests.helpers.conversations import draw_conversations
from tests.helpers.schedules import families_of_tests

BACKENDS = ["cpu"] if cpu.unavailable_reason() is None else ["reference"]
NUM_FAST = 3  # schedules
NUM_SLOW = 13


@pytest.fixture(autouse=True)
def known_families() -> Iterator[None]:
    with families_of_tests():
        yield


def run(seed: int, depth: int, path: Path) -> Counter[str]:
    """Run a schedule, which must have no differences. Returns what it met."""
    conversations = ConversationRun(draw_conversations(seed, BACKENDS), path, depth)
    with torch_threads(1):
        conversations.run()
        assert not list(conversations.differences())
    return conversations.counts + Counter(loaded=conversations.num_loaded)


@pytest.mark.parametrize("seed", range(NUM_FAST))
def test_every_turn_of_a_random_conversation_equals_one_without_a_pause(seed: int, tmp_path: Path) -> None:
    run(seed, 1 + seed % 2, tmp_path)


@pytest.mark.slow
def test_conversations_resume_from_states_and_tiers_also_after_kills(tmp_path: Path) -> None:
    """More of the same; together they meet all that the law is about."""
    counts = Counter[str]()
    for seed in range(NUM_FAST, NUM_SLOW):
        (folder := tmp_path / str(seed)).mkdir()
        counts += run(seed, 1 + seed % 2, folder)
    assert min(counts[name] for name in ("hits", "resumed", "resumed_tokens_compared", "kills", "loaded")) > 0
