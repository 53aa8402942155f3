"""`retain run --chat` and `retain chat` show the content of gpt-oss's channels, and reasoning on a terminal alone."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from retain.cli import run as run_command
from retain.cli.answers import AnswerWriter
from retain.processing.grammar import grammar_from_lark
from retain.processing.input import GenerateRequest
from retain.server.tool_formats.harmony import Format
from retain.terminal import DIM, NORMAL, escaped_output
from tests.helpers.cli import run_cli
from tests.helpers.folders import save_tiny_harmony

REASONING = "<|channel|>analysis<|message|>why<|end|>"
FINAL = "<|start|>assistant<|channel|>final<|message|>so"


class Terminal(io.StringIO):
    """Text that says that it is a terminal."""

    def isatty(self) -> bool:
        return True


def write(pieces: Sequence[str], file: io.StringIO, has_channels: bool = True) -> str:
    """Return the content of an answer that was written in pieces."""
    writer = AnswerWriter(Format().create_parser((), "<|start|>assistant") if has_channels else None, file)
    for piece in pieces:
        writer.write(piece, finished=False)
    writer.write("", finished=True)
    return writer.content


@pytest.mark.parametrize("pieces", [[REASONING + FINAL], list(REASONING + FINAL), [REASONING, FINAL]])
def test_reasoning_is_dimmed_on_a_terminal_and_left_out_elsewhere(pieces: list[str]) -> None:
    terminal, file = Terminal(), io.StringIO()
    assert write(pieces, terminal) == write(pieces, file) == "so"
    assert file.getvalue() == "so\n"
    shown = terminal.getvalue()
    assert shown.replace(DIM, "").replace(NORMAL, "") == "why\n\nso\n"
    assert shown.startswith(DIM) and shown.endswith(f"{NORMAL}\n\nso\n")


def test_a_terminal_obeys_the_style_of_reasoning_and_nothing_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr("sys.stdout", terminal)
    with escaped_output():
        writer = AnswerWriter(Format().create_parser((), "<|start|>assistant"))
        writer.write(REASONING.replace("why", "\x1b[31m") + FINAL.replace("so", "\x07"), finished=True)
    assert terminal.getvalue() == f"{DIM}\\x1b[31m{NORMAL}\n\n\\x07\n"


def test_an_answer_without_channels_is_written_as_it_is() -> None:
    file = Terminal()
    assert write(["<think>a", "</think>b"], file, has_channels=False) == "<think>a</think>b"
    assert file.getvalue() == "<think>a</think>b\n"


def test_answers_of_gpt_oss_are_read_as_a_server_reads_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A grammar lets the model write nothing else. The next turn has the content of the answer alone."""
    make_request, prompts = run_command.make_request, []
    text = REASONING.replace("why", '"why"') + FINAL.replace("so", '"so"')
    for word in ("analysis", "assistant", "final"):
        text = text.replace(word, f' "{word}" ')
    grammar = grammar_from_lark(f"start: {text}")

    def make_forced(*arguments: object) -> GenerateRequest:
        request = make_request(*arguments)  # type: ignore[arg-type]
        prompts.append(request.prompt)
        return replace(request, grammar=grammar)

    monkeypatch.setattr(run_command, "make_request", make_forced)
    options = "--model", save_tiny_harmony(tmp_path), "--kv-memory", "16MiB"
    assert run_cli(capsys, "run", *options, "--chat", "x").out == "so\n"
    answer = json.loads(run_cli(capsys, "run", *options, "--chat", "x", "--json").out)
    assert (answer["text"], answer["reasoning"]) == ("so", "why")
    monkeypatch.setattr("sys.stdin", io.StringIO("x\ny\n"))
    assert run_cli(capsys, "chat", *options).out == "so\nso\n"
    first, second = prompts[-2:]
    assert len(second) > len(first)
