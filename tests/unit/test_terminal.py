"""Text of others never reaches a terminal with control characters, and reaches files and pipes as it is."""

from __future__ import annotations

import io
import logging
import sys
import types
import unicodedata
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from retain import http_client
from retain.terminal import EscapingFormatter, EscapingStream, escape_controls
from tests.helpers.cli import assert_one_line_error, run_cli

HOSTILE = "a\x1b]0;title\x07b\x1b[2Jc\x9b31md\be\u202ef\u2066g"
ESCAPED = r"a\x1b]0;title\x07b\x1b[2Jc\x9b31md\x08e\u202ef\u2066g"
DIRECTIONS = {"LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI"}  # Unicode Standard Annex 9
MARKS = "\u200e\u200f\u061c"


def controls_of(text: str) -> set[str]:
    """Return what a terminal would obey, by the Unicode character database."""
    return {
        c
        for c in text
        if (unicodedata.category(c) in ("Cc", "Cs", "Zl", "Zp") and c not in "\n\t")
        or unicodedata.bidirectional(c) in DIRECTIONS
        or c in MARKS
    }


@given(st.lists(st.text(st.characters())))
@example([HOSTILE])
def test_a_terminal_gets_no_control_character(texts: list[str]) -> None:
    """However a text is cut into pieces; what is no control character stays."""
    shown = io.StringIO()
    stream = EscapingStream(shown)
    whole = "".join(texts)
    stream.writelines(texts)
    assert shown.getvalue() == escape_controls(whole) and not controls_of(shown.getvalue())
    assert escape_controls("".join(c for c in whole if c not in controls_of(whole))) == "".join(
        c for c in whole if c not in controls_of(whole)
    )


class HostileClient:
    """A client of a server that sends control characters."""

    error: str | None = None

    def __init__(self, *args: object) -> None:
        pass

    def first_model(self) -> str:
        return "m"

    def stream(self, path: str, body: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        for c in HOSTILE:
            yield {"choices": [{"delta": {"content": c}}]}
        if self.error:
            raise ValueError(self.error)

    def close(self) -> None:
        pass


@pytest.mark.parametrize("error", [None, HOSTILE])
@pytest.mark.parametrize("is_terminal", [True, False])
def test_chat_shows_what_a_server_sends(
    is_terminal: bool, error: str | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(http_client, "HttpClient", HostileClient)
    monkeypatch.setattr(HostileClient, "error", error)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: is_terminal)
    monkeypatch.setattr(sys, "stdin", io.StringIO("hello\n"))
    result = run_cli(capsys, "chat", "--url", "http://localhost")
    assert result.out.rstrip("\n") == (ESCAPED if is_terminal else HOSTILE)
    assert result.err == (f"retain: {ESCAPED}\n" if error else "")


@pytest.mark.parametrize("is_terminal", [True, False])
def test_no_command_sends_control_characters_to_a_terminal(
    is_terminal: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What any command prints, logs and fails with."""

    def run(args: object) -> int:
        print(HOSTILE)
        logging.getLogger("retain.x").error("%s", HOSTILE)
        raise ValueError(HOSTILE)

    monkeypatch.setitem(sys.modules, "retain.cli.run", types.SimpleNamespace(run=run))
    monkeypatch.setattr(sys.stdout, "isatty", lambda: is_terminal)
    result = run_cli(capsys, "run", "x")
    assert result.out == (f"{ESCAPED}\n" if is_terminal else f"{HOSTILE}\n")
    assert result.err.count(ESCAPED) == 2 and not controls_of(result.err)


@pytest.mark.parametrize(
    "args",
    [
        ("run", "x", HOSTILE),
        (HOSTILE,),
        ("run", f"--{HOSTILE}"),
        ("run", "x", "--log-level", HOSTILE),
        ("run", "x", "--max-tokens", HOSTILE),
        ("bench", HOSTILE),
    ],
)
@pytest.mark.parametrize("newline", ["", "\n"])
def test_errors_of_arguments_quote_no_control_character(
    args: tuple[str, ...], newline: str, capsys: pytest.CaptureFixture[str]
) -> None:
    result = run_cli(capsys, *args[:-1], args[-1] + newline + "x")
    assert_one_line_error(result, "retain")
    assert not controls_of(result.err)


def test_log_lines_quote_no_control_character() -> None:
    error = ValueError(HOSTILE)
    record = logging.makeLogRecord({"msg": "%s", "args": (HOSTILE,), "exc_info": (ValueError, error, None)})
    assert not controls_of(EscapingFormatter().format(record))
