"""Sessions of real agents, replayed: how much of their prompts is found, and what a compaction costs."""

from __future__ import annotations

import re
from itertools import chain, pairwise
from pathlib import Path

import pytest

from tests.helpers.recorded_sessions import FOLDER, WORDS, load_session
from tests.server.real_clients import cached_shares, replay
from tools.clients import load_recipe

NAMES = sorted(path.stem for path in FOLDER.glob("*.json"))
PAGE = (Path(__file__).parents[2] / "docs" / "guide" / "clients.md").read_text()
NAME = re.compile(r"[!-~]{1,96}")
BEGINNINGS = {word[:n] for word in WORDS for n in range(1, len(word) + 1)}  # a line is cut to its length
KINDS = ("turn", "compaction", "turn after compaction")


@pytest.mark.parametrize("name", NAMES)
def test_a_session_finds_what_it_did_when_it_was_recorded(name: str) -> None:
    session = load_session(name)
    replayed = replay(session)
    shares = cached_shares(replayed)
    assert shares == {kind: pytest.approx(share, abs=0.005) for kind, share in session.expected.items()}
    row = [name, session.version, str(len(session.requests)), *(f"{shares[kind]:.0%}" for kind in KINDS)]
    assert f"| {' | '.join(row)} |".replace("%", " %") in PAGE
    if name == "aider":  # what a file says now stands before the newest question
        return
    for (_, before), (request, after) in pairwise(pair for pair in replayed if pair[0].kind != "title"):
        assert request.kind != "turn" or after.cached_tokens >= before.prompt_tokens


@pytest.mark.parametrize("name", NAMES)
def test_a_session_has_no_text_of_its_client(name: str) -> None:
    """Only names and ids in ASCII, texts of ours, and words that stand for lines."""
    session = load_session(name)
    own = [*(request.answer for request in session.requests), *chain(*load_recipe(name).session["commands"])]
    for request in session.requests:
        for text in _iter_texts(request.body):
            is_made_up = all(word in BEGINNINGS for word in text.split())
            is_own = any(text in one for one in own) or "note.txt" in text
            assert NAME.fullmatch(text) or is_own or is_made_up, text[:200]


def _iter_texts(value):
    if isinstance(value, str):
        yield value
    elif isinstance(value, list | dict):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _iter_texts(item)
