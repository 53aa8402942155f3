"""Reasoning: a turn behind an answer that was thought about finds the conversation before that answer."""

from __future__ import annotations

from dataclasses import replace

from cachecheck.endpoint import Endpoint
from cachecheck.probe import Probe

NUM_CHATS = 3
NUM_WORDS = 120
REPLY = 9  # words
FOUND = 0.5  # of the first turn's prompt, at least


def run(probe: Probe) -> None:
    """The next turn, without what was thought, finds the first turn's prompt, and has its own answer."""
    probe.skip_unless(Endpoint.CHAT in probe.capabilities.endpoints, "the server answers no chats")
    for i in range(NUM_CHATS):
        root = replace(probe.texts.prompt(NUM_WORDS + 5 * i), endpoint=Endpoint.CHAT)
        first = probe.ask(root)
        probe.skip_unless(first.reasoning, "no reasoning in the answer to a chat (give more --max-tokens?)")
        said = first.text.removeprefix(first.reasoning)
        following = root.replied(said or "-", probe.texts.words(REPLY))
        answer = probe.ask(following)
        probe.equal_cold(following, answer, f"chat {i}, its second turn")
        if not probe.capabilities.counts_cached:
            continue
        again = probe.ask(root)
        if 2 * again.num_cached < (again.prompt_tokens or 0):
            probe.unsure(f"chat {i}, cached tokens", "even the same prompt finds little in the cache")
            continue
        enough = answer.num_cached >= FOUND * again.num_cached
        detail = f"{answer.num_cached} tokens were found, {again.num_cached} by the first turn, asked again"
        probe.judge(enough, f"chat {i}, cached tokens", detail)
