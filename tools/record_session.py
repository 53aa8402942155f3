"""Record what a real client sends in a session: questions, calls of tools, and a compaction of its history.

    python -m tools.record_session --folder ~/clients codex aider

Writes tests/server/sessions/NAME.json. It holds which texts are equal, and no text of a client
(tests/helpers/recorded_sessions.py); `tests/server/test_recorded_sessions.py` replays it. Recipes are those of
`tools.clients`; their table `session` has the commands of a session.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

from retain.server.openai.chat_protocol import ChatCompletionRequest
from retain.server.openai.prompt_normalization import HEADER_LINE
from tests.helpers.recorded_sessions import FOLDER, load_session
from tests.server.real_clients import Exchange, Generation, Log, cached_shares, replay
from tools import clients
from tools.clients import Recipe

Json = dict[str, Any]
NAME = re.compile(r"[!-~]{0,96}")  # a text that is kept: a name, a role, an id
SUMMARY = "<analysis>It is short.</analysis>\n<summary>The user reads a note about milk again and again.</summary>"
NOTE = "".join(f"{i}. Bring milk, and bread, and number {i} of the list.\n" for i in range(1, 60))
PATHS = ("/v1/chat/completions", "/v1/messages", "/v1/responses")


def answer(recipe: Recipe, work: Path, body: ChatCompletionRequest) -> str:
    """Return what the model says: a call of the recipe's tool to each question of ours, then a text."""
    texts = [json.dumps(message.model_dump()) for message in body.messages if message.role != "system"]
    questions = [command[-1] for command in recipe.commands]
    if any(recipe.compaction in json.dumps(m.model_dump()) for m in (body.messages[0], body.messages[-1])):
        return SUMMARY
    if not body.tools:
        return recipe.plain
    if any(question in texts[-1] for question in questions):
        call = json.dumps(recipe.call).replace("{work}", str(work))
        return f"<tool_call>{call}</tool_call>"
    return f"{recipe.final} That is answer {len(texts) // 4}."


class Disguise:
    """Replaces texts by numbers of their lines, and parts that requests have in common by their own numbers."""

    def __init__(self, places: dict[str, str], own_texts: Sequence[str]):
        """`places`: paths of this machine and what stands for them. `own_texts` are ours, and kept."""
        self.places = places
        self.own_texts = own_texts
        self.lines: dict[str, int] = {}
        self.values: dict[str, int] = {}

    def convert(self, value: Any, depth: int = 0) -> Any:
        """Return a part of a request without a client's texts."""
        if isinstance(value, str):
            return self._convert_text(value)
        if isinstance(value, list):
            items = [self.convert(item, depth + 1) for item in value]
            return [self._share(item) for item in items] if depth == 1 else items
        if isinstance(value, dict):
            return {name: self.convert(item, depth + 1) for name, item in value.items()}
        return value

    def _convert_text(self, text: str) -> str | Json:
        for place, shown in self.places.items():
            text = text.replace(place, shown)
        if NAME.fullmatch(text) or any(text in own for own in self.own_texts) or _is_call(text):
            return text
        if HEADER_LINE.match(text):
            return text
        numbers = [self.lines.setdefault(line, len(self.lines)) for line in text.split("\n")]
        return {"$lines": " ".join(_join_ranges(numbers))}

    def _share(self, value: Any) -> Any:
        """Return the number of a part of a request."""
        if isinstance(value, str | int | float | None):
            return value
        return {"$value": self.values.setdefault(json.dumps(value), len(self.values))}


def _is_call(text: str) -> bool:
    """Return whether a text is the arguments of a call: the model wrote it."""
    return text.startswith("{") and text.endswith("}") and "note.txt" in text


def _join_ranges(numbers: Sequence[int]) -> Iterator[str]:
    for _, group in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0]):
        members = [number for _, number in group]
        yield f"{members[0]}-{members[-1]}" if len(members) > 1 else f"{members[0]}"


def pair_up(log: Log) -> Iterator[tuple[Exchange, Generation]]:
    """Yield requests with the model's answers. Titles have no tools and may overtake turns, which are in order."""
    waiting = list(log.generations)
    for exchange in log.exchanges:
        if exchange.path not in PATHS or exchange.status != 200:
            continue
        found = next((g for g in waiting if bool(g.body.tools) == bool(exchange.body.get("tools"))), None)
        if found:
            waiting.remove(found)
            yield exchange, found


def name_kind(generation: Generation) -> str:
    """Return what a request is for."""
    if generation.answer == SUMMARY:
        return "compaction"
    return "turn" if generation.body.tools or generation.answer != clients.TITLE else "title"


def save(recipe: Recipe, done: clients.Run) -> Path:
    """Write the session of a run, and return its file."""
    places = {done.places["work"]: "/work", done.places["home"]: "/home/user"}
    pairs = list(pair_up(done.log))
    questions = [word for command in recipe.commands for word in command]
    own_texts = [*questions, *(generation.answer for _, generation in pairs)]
    disguise = Disguise(places, own_texts)
    requests = []
    after = ""
    for exchange, generation in pairs:
        kind = name_kind(generation)
        shown = generation.answer
        for place, other in places.items():
            shown = shown.replace(place, other)
        body = disguise.convert(exchange.body)
        name = kind + after if kind == "turn" else kind
        requests.append({"path": exchange.path, "kind": name, "body": body, "answer": shown})
        after = " after compaction" if kind == "compaction" else "" if kind == "turn" else after
    saved = {
        "version": done.version,
        "expected": {},
        "lines": list(map(len, disguise.lines)),
        "values": list(map(json.loads, disguise.values)),
        "requests": requests,
    }
    FOLDER.mkdir(exist_ok=True)
    path = FOLDER / f"{recipe.name}.json"
    path.write_text(json.dumps(saved, separators=(",", ":")) + "\n")
    return path


def main(argv: Sequence[str] | None = None) -> int:
    """Record sessions; the exit status is the number of those that failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="+", metavar="NAME", help="of clients")
    parser.add_argument("--folder", type=Path, required=True, help="what is installed, and will be")
    args = parser.parse_args(argv)
    num_failed = 0
    for name in args.names:
        recipe = clients.load_recipe(name)
        folder = args.folder.expanduser().resolve() / name
        clients.install(recipe, folder)
        recipe = replace(recipe, **recipe.session)
        done = clients.run(recipe, folder, answer, NOTE)
        num_failed += bool(done.failures)
        for exchange, generation in pair_up(done.log):
            kind = name_kind(generation)
            print(f"{exchange.path:22} {kind:12} {generation.prompt_tokens:7} {generation.cached_tokens:7}")
        path = save(recipe, done)
        shares = cached_shares(replay(load_session(name)))
        saved = json.loads(path.read_text()) | {"expected": {kind: round(share, 3) for kind, share in shares.items()}}
        path.write_text(json.dumps(saved, separators=(",", ":")) + "\n")
        print(path, shares, *done.failures)
    return num_failed


if __name__ == "__main__":
    sys.exit(main())
