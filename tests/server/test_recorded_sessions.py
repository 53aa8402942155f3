"""Sessions of real agents, replayed: how much of their prompts is found, and what a compaction costs."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from tests.helpers.recorded_sessions import FOLDER, load_session
from tests.server.real_clients import cached_shares, replay

NAMES = sorted(path.stem for path in FOLDER.glob("*.json"))
PAGE = (Path(__file__).parents[2] / "docs" / "guide" / "clients.md").read_text()
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
    """Only names, of fields and tools and of files of ours, and numbers of lines."""
    for text in _iter_texts(load_session(name).requests[0].body):
        assert len(text) <= 96 or set("".join(text.split())) <= set("abcdefghijklmnopqrstuvwxyz"), text[:200]


def _iter_texts(value):
    if isinstance(value, str):
        yield value
    elif isinstance(value, list | dict):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _iter_texts(item)
