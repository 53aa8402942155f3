"""Sessions of real agents, as requests in the order in which they were sent, with answers that the model is to write.

A session says which texts are equal and which are not, and nothing of what a client wrote: each line of a text is a
number and a length, and becomes words of that length. Names of tools and fields are kept. A file of
tests/server/sessions has:

* `lines`: the length of each line, in characters. Line i is made of the seed i.
* `values`: parts of requests that several of them have, such as definitions of tools and messages.
* `requests`: path, body and answer; `{"$lines": "0-7 9"}` stands for a text, `{"$value": 3}` for a value.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

Json = dict[str, Any]
FOLDER = Path(__file__).parents[1] / "server" / "sessions"
WORDS = ["the", "a", "file", "of", "to", "read", "write", "find", "run", "test", "code", "line", "path", "tool", "name"]


@dataclass(frozen=True)
class RecordedRequest:
    """A request of a session. `kind`: what the agent wants by it, such as a turn, a title or a compaction."""

    path: str
    kind: str
    body: Json
    answer: str


@dataclass(frozen=True)
class RecordedSession:
    """What a client sent in one session, and the share of its prompts that a cache is expected to find."""

    client: str
    version: str
    expected: Mapping[str, float]  # by the kind of requests
    requests: Sequence[RecordedRequest]


def load_session(name: str) -> RecordedSession:
    """Read the session of a client."""
    saved = json.loads((FOLDER / f"{name}.json").read_text())
    lines = [write_line(seed, length) for seed, length in enumerate(saved["lines"])]
    values: list[Any] = []
    for value in saved["values"]:
        values.append(_expand(value, lines, values))
    requests = [
        RecordedRequest(r["path"], r["kind"], _expand(r["body"], lines, values), r["answer"]) for r in saved["requests"]
    ]
    return RecordedSession(name, saved["version"], saved["expected"], requests)


def write_line(seed: int, length: int) -> str:
    """Return words of a total length that depends on nothing else."""
    random = Random(seed)
    words: list[str] = []
    while sum(map(len, words)) + len(words) <= length:
        words.append(random.choice(WORDS))
    return " ".join(words)[:length]


def _expand(value: Any, lines: Sequence[str], values: Sequence[Any]) -> Any:
    """Return a value with its texts."""
    if isinstance(value, list):
        return [_expand(item, lines, values) for item in value]
    if not isinstance(value, dict):
        return value
    if "$lines" in value:
        return "\n".join(lines[i] for i in _iter_numbers(value["$lines"]))
    if "$value" in value:
        return values[value["$value"]]
    return {name: _expand(item, lines, values) for name, item in value.items()}


def _iter_numbers(ranges: str) -> Iterator[int]:
    for part in ranges.split():
        first, _, last = part.partition("-")
        yield from range(int(first), int(last or first) + 1)
