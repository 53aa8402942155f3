"""Laws of the reasoning parser: however the text is cut, the parts are those of the whole text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from retain.server.openai.chat_output import ReasoningParser

PIECES = st.lists(st.sampled_from(["<think>", "</think>", "<th", "ink>", "</", "a", "\n", " ", "b c"]), max_size=12)


def parse(pieces: list[str], prompt_opens_reasoning: bool) -> tuple[str, str]:
    parser = ReasoningParser(prompt_opens_reasoning)
    parts = [parser.feed(piece, finished=False) for piece in pieces] + [parser.feed("", finished=True)]
    return "".join(r for r, _ in parts), "".join(c for _, c in parts)


@given(PIECES, st.booleans())
def test_parts_do_not_depend_on_how_the_text_is_cut(pieces: list[str], prompt_opens_reasoning: bool) -> None:
    text = "".join(pieces)
    whole = parse([text], prompt_opens_reasoning)
    assert parse(pieces, prompt_opens_reasoning) == parse(list(text), prompt_opens_reasoning) == whole
    if "<think>" not in text and "</think>" not in text and not prompt_opens_reasoning:
        assert whole == ("", text)


@pytest.mark.parametrize(
    ("text", "prompt_opens_reasoning", "expected"),
    [
        ("<think>\nwhy\n</think>\n\nso", False, ("\nwhy\n", "so")),
        ("why</think>so", True, ("why", "so")),
        ("cut off", True, ("cut off", "")),
        ("so <think>no</think>", False, ("", "so <think>no</think>")),
        ("</think>", False, ("", "</think>")),
        ("<think></think>a</think>", False, ("", "a</think>")),
    ],
)
def test_reasoning_is_at_the_beginning_only(text: str, prompt_opens_reasoning: bool, expected: tuple[str, str]) -> None:
    assert parse([text], prompt_opens_reasoning) == expected
