"""Conversations that branch: siblings behind one beginning, continued in turns."""

from __future__ import annotations

from dataclasses import replace

from cachecheck.answer import Answer
from cachecheck.probe import Probe
from cachecheck.texts import Prompt

NUM_BRANCHES = 3
NUM_TURNS = 2  # behind the branch
LENGTHS = (21, 30, 43)  # words of the first turn
REPLY = 9  # words


def run(probe: Probe) -> None:
    """Each turn of each branch has the answer that it has without a cache, and has it again at the end."""
    for endpoint in probe.capabilities.endpoints:
        for num_words in LENGTHS:
            root = replace(probe.texts.prompt(num_words), endpoint=endpoint)
            check_tree(probe, root, f"{endpoint} {num_words}")


def check_tree(probe: Probe, root: Prompt, name: str) -> None:
    """Ask a root, then all branches turn by turn, then everything again, the last one first."""
    asked: list[tuple[str, Prompt, Answer]] = []

    def ask(what: str, prompt: Prompt) -> Answer:
        answer = probe.ask(prompt)
        asked.append((what, prompt, answer))
        return answer

    answer = ask(f"{name}, first turn", root)
    replays = probe.config.reference == "replay"  # siblings may end what a turn goes on from, so there are none
    ends = [(root, answer)] * (1 if replays else NUM_BRANCHES)
    for turn in range(NUM_TURNS):
        for i, (prompt, answer) in enumerate(ends):
            following = prompt.replied(answer.text or "-", probe.texts.words(REPLY))
            answer = ask(f"{name}, branch {i}, turn {turn}", following)
            probe.equal_cold(following, answer, f"{name}, branch {i}, turn {turn}")
            ends[i] = (following, answer)
    if replays:
        return  # what an earlier turn kept may be gone: its prompt is then computed anew, with another answer
    for what, prompt, first in reversed(asked):
        probe.equal(first, probe.ask(prompt), f"{what}, again")
