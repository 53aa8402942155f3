"""Scanners: they find where a tool call ends in generated text that arrives in pieces.

A marker inside of a quoted text does not end a call. Each scanner reads a character once, however the text is cut.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from typing import NamedTuple, Protocol

from retain.processing.reasoning import partial_mark_length

BRACKETS = re.compile(r'["{}\[\]]')
IN_STRING = re.compile(r'\\.|"', re.DOTALL)
MAX_BLANKS = 64  # between a value and what ends its call: more would be read again and again


class Scan(Enum):
    """What a scanner has found."""

    MORE = "more"  # the call goes on: what is not read is to be given again, with more text behind it
    CALL = "call"  # the end of the call
    TEXT = "text"  # this is no call


class Scanned(NamedTuple):
    """What was found, where the body ends, and where the text behind the call begins."""

    found: Scan
    body_end: int
    end: int

    @classmethod
    def more(cls, position: int) -> Scanned:
        """Return that text before a position was read."""
        return cls(Scan.MORE, position, position)

    @classmethod
    def text(cls, position: int) -> Scanned:
        """Return that what was read up to a position is no call."""
        return cls(Scan.TEXT, position, position)


class CallScanner(Protocol):
    """Finds the end of one call."""

    def scan(self, text: str, start: int, finished: bool) -> Scanned:
        """Read text from `start`, which is where the last call of this ended; all of it once it has `finished`."""


def end_call(text: str, body_end: int, start: int, ends: Sequence[str], finished: bool) -> Scanned:
    """Return where a call ends whose body has ended: behind the longest closing marker that stands at `start`."""
    found = max((len(end) for end in ends if text.startswith(end, start)), default=0)
    if _may_be_longer(text, start, ends):
        if not finished:
            return Scanned.more(body_end)
        found = len(text) - start  # the text ends inside of the marker
    return Scanned(Scan.CALL, body_end, start + found if found else body_end)


def cut_marks(text: str, start: int, marks: Iterable[str], finished: bool) -> int:
    """Return where the end of a text begins that may belong to one of some marks. `start`: what precedes does not."""
    if finished:
        return len(text)
    marks = tuple(marks)
    tail = text[max(start, len(text) - max(map(len, marks), default=0)) :]
    return len(text) - max((partial_mark_length(tail, mark) for mark in marks), default=0)


def _may_be_longer(text: str, start: int, marks: Sequence[str]) -> bool:
    """Return whether a text from `start` on may be the beginning of a mark, and not all of it."""
    rest = text[start : start + max(map(len, marks), default=0)]
    return any(len(mark) > len(rest) and mark.startswith(rest) for mark in marks)


@lru_cache(64)
def compile_marks(marks: tuple[str, ...], escapes: bool = False) -> re.Pattern[str]:
    """Return a pattern of any of some marks, the longest first, and of what a backslash escapes."""
    pattern = "|".join(map(re.escape, sorted(marks, key=len, reverse=True)))
    return re.compile(rf"\\.|{pattern}" if escapes else pattern, re.DOTALL)


@dataclass
class MarkerScanner:
    """Ends a call at the first of its markers. `begins` begin another one: what came before them was no call."""

    ends: Sequence[str]
    begins: Sequence[str] = ()

    def scan(self, text: str, start: int, finished: bool) -> Scanned:
        """Look for the first marker from `start` on. One of `ends` ends the call; one of `begins` makes it text."""
        marks = (*self.ends, *self.begins)
        match = compile_marks(marks).search(text, start)
        if not match:
            return Scanned.more(cut_marks(text, start, marks, finished))
        if match[0] in self.begins:
            return Scanned.text(match.start())
        return end_call(text, match.start(), match.start(), self.ends, finished)


@dataclass
class QuotedScanner:
    """Ends a call at the first of its markers outside of quotes. `escapes`: a backslash escapes a character in them."""

    ends: Sequence[str]
    begins: Sequence[str]
    quotes: Sequence[str] = ('"',)
    escapes: bool = True
    quote: str = ""  # that is open

    def scan(self, text: str, start: int, finished: bool) -> Scanned:
        """Look for the first marker outside of quotes from `start` on, and note whether a quote stays open."""
        position = start
        while True:
            marks = (self.quote,) if self.quote else (*self.quotes, *self.ends, *self.begins)
            escapes = self.escapes and bool(self.quote)
            match = compile_marks(marks, escapes).search(text, position)
            if not match:
                is_escaping = escapes and not finished and text.endswith("\\", position)
                return Scanned.more(min(cut_marks(text, position, marks, finished), len(text) - is_escaping))
            if match[0] in self.ends and not self.quote:
                return end_call(text, match.start(), match.start(), self.ends, finished)
            if match[0] in self.begins and not self.quote:
                return Scanned.text(match.start())
            if match[0] in self.quotes:
                self.quote = "" if self.quote else match[0]
            position = match.end()


@dataclass
class ValueScanner:
    """Ends a call where its JSON value ends, with the marker behind that, if there is one.

    `openers` begin the value; what precedes it is part of the body.
    """

    ends: Sequence[str] = ()
    begins: Sequence[str] = ()
    openers: str = "{["
    depth: int = 0
    in_string: bool = False
    is_complete: bool = False

    def scan(self, text: str, start: int, finished: bool) -> Scanned:
        """Read the JSON value from `start` on, by the depth of its brackets, and the marker behind it."""
        position = start
        if not self.depth and not self.is_complete:
            marks = (*self.openers, *self.ends, *self.begins)
            opener = compile_marks(marks).search(text, position)
            if not opener or (not finished and _may_be_longer(text, opener.start(), marks)):
                return Scanned.more(cut_marks(text, position, marks, finished))
            if opener[0] in self.begins:
                return Scanned.text(opener.start())
            if opener[0] in self.ends:
                return end_call(text, opener.start(), opener.start(), self.ends, finished)
            self.depth = 1
            position = opener.end()
        if self.depth:
            position = self._read_value(text, position)
            if self.depth:
                return Scanned.more(len(text) if finished else position)
            self.is_complete = True
        return self._read_end(text, position, finished)

    def _read_value(self, text: str, position: int) -> int:
        """Read up to the end of the value. Returns what was read: not a backslash at the end of the text."""
        while self.depth:
            match = (IN_STRING if self.in_string else BRACKETS).search(text, position)
            if not match:
                return len(text) - (self.in_string and text.endswith("\\", position))
            if match[0] == '"':
                self.in_string = not self.in_string
            elif not self.in_string:
                self.depth += 1 if match[0] in "{[" else -1
            position = match.end()
        return position

    def _read_end(self, text: str, value_end: int, finished: bool) -> Scanned:
        """Read the marker behind a value. Without one the call ends with the value."""
        if not self.ends:
            return Scanned(Scan.CALL, value_end, value_end)
        at = skip_blanks(text, value_end)
        if at == len(text) and not finished:
            return Scanned.more(value_end)
        return end_call(text, value_end, at, self.ends, finished)


@dataclass
class TagScanner:
    """Ends a call at the first of its markers outside of values between tags.

    A value goes on behind its closing tag, unless one of the `followers` comes next: a text may have the tag itself.
    """

    ends: Sequence[str]
    begins: Sequence[str]
    opener: str
    closer: str
    followers: Sequence[str]
    in_value: bool = False

    def scan(self, text: str, start: int, finished: bool) -> Scanned:
        """Look for the first marker outside of tagged values from `start` on, and note whether a value stays open."""
        position = start
        while True:
            marks = (self.closer,) if self.in_value else (self.opener, *self.ends, *self.begins)
            match = compile_marks(marks).search(text, position)
            if not match:
                return Scanned.more(cut_marks(text, position, marks, finished))
            if self.in_value:
                is_closed = is_value_closed(text, match.end(), self.followers, finished)
                if is_closed is None:
                    return Scanned.more(match.start())
                self.in_value = not is_closed
            elif match[0] in self.ends:
                return end_call(text, match.start(), match.start(), self.ends, finished)
            elif match[0] in self.begins:
                return Scanned.text(match.start())
            else:
                self.in_value = True
            position = match.end()


def is_value_closed(text: str, start: int, followers: Sequence[str], finished: bool) -> bool | None:
    """Return whether a closing tag before `start` ends its value; None: more text will tell."""
    at = skip_blanks(text, start)
    if any(text.startswith(follower, at) for follower in followers):
        return True
    if finished:
        return at == len(text)
    rest = text[at : at + max(map(len, followers))]
    may_follow = at - start < MAX_BLANKS and any(follower.startswith(rest) for follower in followers)
    return None if may_follow else False


def skip_blanks(text: str, start: int) -> int:
    """Return where a text goes on behind blanks, of which at most MAX_BLANKS are skipped."""
    at = start
    while at < len(text) and at - start < MAX_BLANKS and text[at].isspace():
        at += 1
    return at
