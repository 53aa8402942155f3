"""The likely cause of two texts parting: what differs where a prompt leaves the nearest cached text."""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from dataclasses import dataclass, replace
from enum import Enum
from itertools import takewhile
from typing import Any

MIN_RESYNC = 24  # characters that agree again behind white space that differs
MIN_HISTORY = 120  # characters that agree again behind the first message
MIN_TEMPLATE_TEXT = 20  # characters of a text that the template itself writes
MAX_WASTED_CHARACTERS = 500_000  # that may look like JSON and are not
CONTEXT = 64  # characters on both sides of the place that may belong to a date, an id or a marker
MONTHS = "jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec"
DATE_OR_ID = re.compile(
    r"\d{4}-\d{1,2}-\d{1,2}(?:[T ]\d{1,2}:\d{2}(?::\d{2}(?:\.\d+)?)?)?Z?"  # ISO 8601
    r"|\d{1,4}[./]\d{1,2}[./]\d{2,4}"
    r"|\d{1,2}:\d{2}(?::\d{2})?"
    rf"|\b\d{{1,2}}(?:st|nd|rd|th)?\.? (?:{MONTHS})[a-z]*(?:,? \d{{4}})?"
    rf"|\b(?:{MONTHS})[a-z]*\.? \d{{1,2}}(?:st|nd|rd|th)?\b(?:,? \d{{4}})?"
    r"|\b(?:mon|tues|wednes|thurs|fri|satur|sun)day\b"
    r"|\b(?:(?=[\w-]*\d)(?=[\w-]*[a-z])[\w-]{6,}|\d{6,})\b"  # a UUID, a hash, seconds since 1970
    r"|(?:\b|_)(?:id|session|request|trace|nonce|ticket)\W{1,3}\d[\w-]*",
    re.I,
)
THINKING = re.compile(r"</?(?:think|thinking|reasoning)>")


class Cause(Enum):
    """What differs between two texts."""

    TOKENIZATION = "tokenization"
    TOOL_ORDER = "tool_order"
    TOOLS = "tools"
    TEMPLATE = "template"
    WHITE_SPACE = "white_space"
    DATE_OR_ID = "date_or_id"
    SYSTEM_TAIL = "system_tail"
    OTHER_TEXT = "other_text"


@dataclass(frozen=True)
class Parting:
    """Two texts that begin with `before`, and the rest of each, special tokens included.

    `template` is the source of the chat template.
    """

    before: str
    prompt: str
    nearest: str
    special_tokens: Collection[str] = ()
    template: str = ""

    def at_first_character(self) -> Parting:
        """Move the characters that the first tokens still share into `before`."""
        pairs = zip(self.prompt, self.nearest, strict=False)
        n = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        return replace(self, before=self.before + self.prompt[:n], prompt=self.prompt[n:], nearest=self.nearest[n:])

    def beginnings(self, length: int) -> tuple[str, str]:
        """Return the first characters of both rests."""
        return self.prompt[:length], self.nearest[:length]


def find_cause(parting: Parting) -> Cause:
    """Return the likely cause for which a prompt parts from its nearest cached one."""
    p = parting.at_first_character()
    if not p.prompt or not p.nearest:
        return Cause.TOKENIZATION
    found = _compare_tools(p) or _compare_white_space(p) or _compare_template(parting) or _compare_dates_and_ids(p)
    return found or _compare_first_messages(p) or Cause.OTHER_TEXT


# ---- tools -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ToolDefinition:
    """A definition of a tool, a JSON object, and its place in a text."""

    canonical: str
    begin: int
    end: int


def _compare_tools(p: Parting) -> Cause | None:
    """Compare the definitions of tools, where the texts part among them."""
    ours, theirs = (find_tools(p.before + text) for text in (p.prompt, p.nearest))
    if not ours or not theirs or not ours[0].begin < len(p.before) < max(ours[-1].end, theirs[-1].end):
        return None
    our_tools, their_tools = ([tool.canonical for tool in tools] for tools in (ours, theirs))
    return Cause.TOOL_ORDER if sorted(our_tools) == sorted(their_tools) else Cause.TOOLS


def find_tools(text: str) -> list[ToolDefinition]:
    """Return the definitions of tools in a text: JSON objects with a name, and a description or parameters."""
    found = []
    at = 0
    decoder = json.JSONDecoder()
    left = MAX_WASTED_CHARACTERS
    while (at := text.find("{", at)) >= 0 and left > 0:
        try:
            value, end = decoder.raw_decode(text, at)
        except json.JSONDecodeError as error:
            left -= error.pos - at
            at += 1
            continue
        except RecursionError:
            break
        tool: Any = value.get("function", value)
        if isinstance(tool, dict) and "name" in tool and ("parameters" in tool or "description" in tool):
            found.append(ToolDefinition(json.dumps(tool, sort_keys=True), at, end))
        at = end
    return found


# ---- the first message ----------------------------------------------------------------------------------------------


def _compare_first_messages(p: Parting) -> Cause | None:
    """Find another end of the first message, before messages that are the same."""
    ours, theirs = (_split_message(text, p.special_tokens) for text in (p.prompt, p.nearest))
    if not ours or not theirs or ours[0] != theirs[0] or ours[0] in p.before:
        return None  # of a later message, or nothing to compare
    n = min(len(ours[1]), len(theirs[1]), MIN_HISTORY)
    return Cause.SYSTEM_TAIL if n == MIN_HISTORY and ours[1][:n] == theirs[1][:n] else None


def _split_message(text: str, special_tokens: Collection[str]) -> tuple[str, str] | None:
    """Return the special token that ends a message, and what follows it."""
    ends = [(text.index(token), token) for token in special_tokens if token and token in text]
    if not ends:
        return None
    at, token = min(ends)
    return token, text[at + len(token) :]


# ---- white space, template, dates and ids ----------------------------------------------------------------------------


def _compare_white_space(p: Parting) -> Cause | None:
    """Find texts that agree for a while without their white space."""
    if not p.prompt[0].isspace() and not p.nearest[0].isspace():
        return None
    ours, theirs = ("".join(text[: 8 * MIN_RESYNC].split()) for text in (p.prompt, p.nearest))
    n = min(len(ours), len(theirs), MIN_RESYNC)
    return Cause.WHITE_SPACE if ours[:n] == theirs[:n] else None


def _compare_template(p: Parting) -> Cause | None:
    """Find markup that a chat template wrote otherwise for one of the texts."""
    if _begins_with_thinking(p.before, p.prompt) != _begins_with_thinking(p.before, p.nearest):
        return Cause.TEMPLATE
    special = tuple(t for t in p.special_tokens if t)
    if not p.before and p.prompt.startswith(special) != p.nearest.startswith(special):
        return Cause.TEMPLATE  # raw text, or another template
    beginnings = p.at_first_character().beginnings(MIN_TEMPLATE_TEXT)
    if any(len(text) == MIN_TEMPLATE_TEXT and text in p.template for text in beginnings):
        return Cause.TEMPLATE  # a text of its own, such as a default system prompt
    begins_message = p.before.endswith(tuple(t for t in special if "start" in t))  # of another role
    return Cause.TEMPLATE if begins_message else None


def _begins_with_thinking(before: str, text: str) -> bool:
    """Return whether a block of thinking begins or ends where two texts part."""
    left = before[-CONTEXT:]
    indent = len(text) - len(text.lstrip())
    matches = THINKING.finditer(left + text[: indent + CONTEXT])
    return any(m.start() <= len(left) + indent and m.end() > len(left) for m in matches)


def _compare_dates_and_ids(p: Parting) -> Cause | None:
    """Find a date, a time or an id across the place where the texts part."""
    ours, theirs = (_date_or_id_at(p.before, text) for text in (p.prompt, p.nearest))
    if not ours or not theirs or ours[1] == theirs[1]:
        return None
    label = ours[0].rpartition("\n")[2].strip()
    if "strftime_now" in p.template and len(label) > 3 and label in p.template:
        return Cause.TEMPLATE  # it writes today's date
    return Cause.DATE_OR_ID


def _date_or_id_at(before: str, text: str) -> tuple[str, str] | None:
    """Return a date or id that touches the end of `before`, and what stands before it."""
    left = before[-CONTEXT:]
    matches = DATE_OR_ID.finditer(left + text[:CONTEXT])
    touching = (m for m in matches if m.start() <= len(left) <= m.end())
    return next(((left[: m.start()], m[0]) for m in touching), None)
