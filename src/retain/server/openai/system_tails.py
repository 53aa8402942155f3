"""Ends of system prompts that change while a conversation goes on, such as lists of tasks.

What follows a change is computed again, and the whole history follows the system prompt. So an end that has changed
belongs behind the history. Where it begins, two requests of one conversation show.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b
from threading import Lock
from typing import Any

from retain.sequences import count_common
from retain.server.openai.chat_protocol import ChatCompletionRequest, InputMessageParam
from retain.server.openai.messages import hash_messages, hash_value

MAX_REQUESTS = 64  # that are remembered of an API key: the newest one of each conversation
MAX_HEADS = 64  # of an API key
MAX_LINES = 1024  # of a system prompt: one with more is left as it is
CHANGE = 8  # requests with the same tail that weigh as much as one change
MAX_SCORE = 4 * CHANGE
MIN_HEAD = 0.5  # of a system prompt: an end that is longer stays where it is
OPENING = re.compile(r"#|<[^/]|.*:\s*\Z")  # a line that belongs to what follows it


class SystemTails:
    """Learns, for each API key, which system prompts have an end that changes. Threads may share it."""

    def __init__(self) -> None:
        self._keys: dict[str, _Known] = {}
        self._lock = Lock()

    def note(self, key_name: str, body: ChatCompletionRequest) -> None:
        """Compare the system prompt of a request with the one of the request that it continues, if one is known."""
        lines = _split_lines(system_text(body))
        if len(lines) < 2:
            return
        current = _hash_lines(lines, body.cache_salt)
        history = hash_messages(hash_value(body.cache_salt), body.messages[1:])
        with self._lock:
            known = self._keys.setdefault(key_name, _Known())
            continued = next((known.requests.pop(h) for h in history[-2:0:-1] if h in known.requests), None)
            known.requests.pop(history[-1], None)
            known.requests[history[-1]] = current
            if continued is not None:
                known.count(lines, current, count_common(continued, current), list(continued) != current)
            _drop_oldest(known.requests, MAX_REQUESTS)
            _drop_oldest(known.heads, MAX_HEADS)

    def split(self, key_name: str, body: ChatCompletionRequest) -> tuple[str, str] | None:
        """Return the system prompt in two parts, of which the second one changes; None where none is known to."""
        with self._lock:
            known = self._keys.get(key_name)
            heads = {head for head, score in known.heads.items() if score > CHANGE} if known else set()
        lines = _split_lines(system_text(body)) if heads else []
        num_kept = next((i for i, h in enumerate(_hash_lines(lines, body.cache_salt), 1) if h in heads), len(lines))
        head = "".join(lines[:num_kept])
        tail = "".join(lines[num_kept:])
        return (head, tail) if tail.strip() and len(head) >= MIN_HEAD * len(head + tail) else None


class _Known:
    """What is known of an API key: system prompts of requests, by their histories, and heads that a tail follows.

    All are hashes: of a system prompt, those of its beginnings up to the end of each line. A head has a score: a change
    of its tail adds `CHANGE`, and a request with the same tail takes one off. From the second change on a tail counts
    as one that changes, unless many requests had the same one between: a date changes once a day.
    """

    def __init__(self) -> None:
        self.requests: OrderedDict[bytes, Sequence[bytes]] = OrderedDict()
        self.heads: OrderedDict[bytes, int] = OrderedDict()

    def count(self, lines: Sequence[str], current: Sequence[bytes], num_common: int, has_changed: bool) -> None:
        """Note that a system prompt had `num_common` lines of the one before, and whether it has changed."""
        own = [h for h in current[:num_common] if h in self.heads]
        if has_changed:
            head = _find_section(lines, num_common)
            own = own[:1] or ([current[head - 1]] if head else [])
        for h in own:
            score = self.heads.pop(h, 0) + (CHANGE if has_changed else -1)
            if has_changed and score > CHANGE:
                score = MAX_SCORE  # so that it does not move to and fro
            self.heads |= {h: score} if score > 0 else {}


def system_text(body: ChatCompletionRequest) -> str:
    """Return the text of the system message that a conversation begins with, or ""."""
    first = body.messages[0]
    if not isinstance(first, InputMessageParam) or first.role not in ("system", "developer"):
        return ""
    return first.content if isinstance(first.content, str) else "".join(part.text for part in first.content)


def _split_lines(text: str) -> list[str]:
    """Return the lines of a text with their ends; none where there are too many."""
    return re.findall(r"[^\n]*\n|[^\n]+", text) if text.count("\n") < MAX_LINES else []


def _hash_lines(lines: Sequence[str], salt: str | None) -> list[bytes]:
    """Return a hash of the text up to the end of each line, under a salt."""
    hashes = []
    state = blake2b(hash_value(salt), digest_size=16)
    for line in lines:
        state.update((line.removesuffix("\n") + "\n").encode(errors="surrogatepass"))
        hashes.append(state.digest())
    return hashes


def _find_section(lines: Sequence[str], changed: int) -> int:
    """Return where the paragraph of a line that changed begins, with its heading or tag."""
    first = changed
    while first and lines[first - 1].strip() and not OPENING.match(lines[first - 1]):
        first -= 1
    while first and (not lines[first - 1].strip() or OPENING.match(lines[first - 1])):
        first -= 1
    while first < changed and not lines[first].strip():  # empty lines end the paragraph before
        first += 1
    return first


def _drop_oldest(kept: OrderedDict[bytes, Any], most: int) -> None:
    while len(kept) > most:
        kept.popitem(last=False)
