"""Pieces of grammars in llguidance's dialect of Lark: texts with special tokens, and reasoning before an answer."""

from __future__ import annotations

import json
import re
from collections.abc import Collection

from retain.processing.reasoning import Reasoning, ReasoningState

PLAIN_NAME = re.compile(r"<[^<>\[\]\s]+>")
OUTSIDE_NAMES = re.compile(r"[<>\s]")
SYNTAX = r"/\.+*?()|[]{}^$#&-~"
BLANKS = r"/[ \t\r\n]{1,5}/"  # a line and its indentation: small models would write blanks for ever


def name_special_token(text: str) -> str:
    """Return the name that a grammar has for a special token: its text, in angle brackets."""
    return text if PLAIN_NAME.fullmatch(text) else f"<:{OUTSIDE_NAMES.sub('_', text)}:>"


def write_text(text: str, special_tokens: Collection[str] = ()) -> str:
    """Return the grammar of one text, in which special tokens are tokens. Empty for an empty text."""
    if not special_tokens:
        return json.dumps(text) if text else ""
    pattern = "|".join(map(re.escape, sorted(special_tokens, key=len, reverse=True)))
    pieces = re.split(f"({pattern})", text)
    names = (name_special_token(p) if p in special_tokens else json.dumps(p) for p in pieces if p)
    return " ".join(names)


def list_rules(prefix: str, number: int) -> str:
    """Return the grammar of one of several rules, whose names are a prefix and a number."""
    return " | ".join(f"{prefix}{i}" for i in range(number))


def start_with_call(begin: str, number: int, end: str, special_tokens: Collection[str] = ()) -> str:
    """Return the rule `start` of one of several calls, the rules call0, call1 and so on, between two texts."""
    first = write_text(begin, special_tokens)
    last = write_text(end, special_tokens)
    return f"start: {first} ({list_rules('call', number)}) {last}"


def write_text_before(name: str, end: str, special_tokens: Collection[str] = ()) -> str:
    """Return the rule of any text up to an end, which is part of it."""
    if end in special_tokens:  # no pattern matches a special token
        return f"{name}: /(.|\\n)*/ {name_special_token(end)}"
    return f"{name}[lazy]: /(.|\\n)*{_escape(end)}/"


def _escape(text: str) -> str:
    """Return a pattern of llguidance for a text."""
    return "".join(f"\\{c}" if c in SYNTAX else "\\n" if c == "\n" else c for c in text)


def precede_with_reasoning(grammar: str, reasoning: Reasoning | None, special_tokens: Collection[str] = ()) -> str:
    """Return a grammar of answers as one of whole texts, which may begin with reasoning or have to.

    Its rule `start` becomes `answer`.
    """
    if reasoning is None:
        return grammar
    marks = reasoning.marks
    rules = [grammar.replace("start:", "answer:", 1), f"blanks: {BLANKS}"]
    answer = "answer"
    if marks.answer_begin:
        begin, end = (write_text(text, special_tokens) for text in (marks.answer_begin, marks.answer_end))
        answer = f"(answer | {begin} blanks? answer blanks? {end})"
    begin = write_text(marks.begin, special_tokens)
    before = {
        ReasoningState.OPEN: "reasoning blanks?",
        ReasoningState.POSSIBLE: f"({begin} reasoning blanks?)?",
        ReasoningState.CLOSED: "blanks?",
    }[reasoning.state]
    if reasoning.state is not ReasoningState.CLOSED:
        rules.append(write_text_before("reasoning", marks.end, special_tokens))
    return "\n".join([f"start: {before} {answer}", *rules])
