"""Conversations of a coding agent, made up from a seed, for the bench of sessions.

Shapes are those of published traces: 41 turns a session in 15,000 trajectories on SWE-bench
(huggingface.co/datasets/thoughtworks/agentic-coding-trajectories), and in TraceLab (arXiv 2606.30560: 4,265 sessions of
Claude Code and Codex) eight steps of tools for each message of a user, answers far shorter than what tools show, heavy
tails of what they show, and people who take minutes. Tools show files of Python's standard library. Answers name and
quote what tools showed earlier, so that a cache which forgot it predicts them worse.
"""

from __future__ import annotations

import math
import random
import re
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from tools.agent_bench.config import AgentBenchConfig
from tools.agent_bench.recording import USER_PAUSE, Message, RecordedConversation

SYSTEM = """You are a coding agent in a repository. Read before you write, change as little as you can, run the tests.
Call one tool in each answer, as a command in backquotes: `cat PATH`, `grep NAME`, `edit PATH` or `pytest PATH`.
Style of this repository, by example:
"""
TASKS = (
    "A user reports that `{name}` in {path} fails for empty input. Find out why, and fix it.",
    "Please make `{name}` in {path} raise ValueError for bad input, and add a test.",
    "Rename `{name}` of {path} everywhere, and keep the old name as an alias.",
    "Why is `{name}` in {path} so slow? Measure it, then make it faster.",
)
THOUGHTS = (
    "`{name}` is used here, so I look at how it is defined.",
    "The error comes from `{name}`; I want to see what calls it.",
    "This fits the report: `{name}` is read before it is set.",
    "I keep what `{name}` does, and change only the condition.",
    "Before I go on I check where else `{name}` is used.",
)
OUTPUT = "Output of `{call}`:\n"
TURNS_PER_TASK = 8
MAX_GOING_BACK = 4  # turns


class CodingAgent:
    """Makes conversations up. `num_tokens` counts those of a text. Raises ValueError without a standard library."""

    def __init__(self, config: AgentBenchConfig, num_tokens: Callable[[str], int]):
        self.config = config
        self.num_tokens = num_tokens
        self.rng = random.Random(config.seed)
        self.files = read_sources()
        example = "\n".join(self._show_file(self._path(), config.system_len))
        self.system = {"role": "system", "content": SYSTEM + example}

    def make_sessions(self, num_sessions: int) -> list[RecordedConversation]:
        """Return the conversations of so many sessions; some begin inside an earlier one."""
        found: list[RecordedConversation] = []
        for i in range(num_sessions):
            begin = [self.system]
            if found and self.rng.random() < self.config.branch_rate:
                parent = self.rng.choice(found).messages
                end = 1 + 2 * self.rng.randrange(len(parent) // 2)  # behind an answer, or the system's message
                begin = parent[:end]
            found += self._make_session(str(i), begin)
        return found

    def _make_session(self, name: str, begin: Sequence[Message]) -> Iterator[RecordedConversation]:
        c = self.config
        num_turns = self.rng.randint(max(c.turns // 2, 1), c.turns + c.turns // 2)
        messages = [*begin, self._ask()]
        for turn in range(1, num_turns + 1):
            call, answer = self._answer(messages)
            messages.append({"role": "assistant", "content": answer})
            if turn == num_turns:
                continue
            if self.rng.random() < c.edit_rate:
                yield RecordedConversation(name, messages)
                last = len(messages) - 2 * self.rng.randint(1, min(MAX_GOING_BACK, (len(messages) - 1) // 2))
                messages = [*messages[:last], self._ask()]
            else:
                messages.append(self._run(call) if turn % TURNS_PER_TASK else self._ask())
        yield RecordedConversation(name, messages)

    def _ask(self) -> Message:
        """Return what a user says."""
        path = self._path()
        text = self.rng.choice(TASKS).format(name=self._name("\n".join(self.files[path])), path=path)
        return {"role": "user", "content": text, "pause": self._pause(USER_PAUSE)}

    def _answer(self, messages: Sequence[Message]) -> tuple[str, str]:
        """Return the call of a tool, and the answer that ends with it."""
        length = self._length(self.config.answer_len, sigma=0.5)
        shown = [m["content"] for m in messages if m["content"].startswith("Output of")]
        source = self.rng.choice(shown) if shown else messages[-1]["content"]
        path = self._path()
        tools = ["cat", "cat", "cat", "grep", "pytest", *(["edit"] if shown else [])]
        tool = self.rng.choice(tools)
        call = f"{tool} {self._name(source) if tool == 'grep' else path}"
        lines = [self.rng.choice(THOUGHTS).format(name=self._name(source))]
        quoted = source.splitlines()[1:]
        start = self.rng.randrange(max(len(quoted), 1))
        while self._count(lines) < length and tool == "edit" and start < len(quoted):
            lines.append(quoted[start])
            start += 1
        while self._count(lines) < length:
            lines.append(self.rng.choice(THOUGHTS).format(name=self._name(source)))
        return call, "\n".join([*lines, f"`{call}`"])

    def _run(self, call: str) -> Message:
        """Return what a tool shows."""
        tool, _, argument = call.partition(" ")
        length = self._length(self.config.tool_output_len, sigma=1.0)
        if tool == "grep":
            lines = self._search(argument, length)
        else:
            lines = self._show_file(argument, max(length // 8, 1) if tool == "edit" else length)
        lines += ["E   AssertionError", "1 failed"] if tool == "pytest" else []
        text = OUTPUT.format(call=call) + "\n".join(lines)
        return {"role": "user", "content": text, "pause": self._pause(1), "speaker": tool}

    def _show_file(self, path: str, length: int) -> list[str]:
        """Return lines of a file from a random one on, of about so many tokens."""
        lines = self.files[path]
        start = self.rng.randrange(len(lines))
        return self._take(lines[start:] + lines[:start], length)

    def _search(self, name: str, length: int) -> list[str]:
        """Return the lines of all files with a name, from a random file on, of about so many tokens."""
        paths = list(self.files)
        start = self.rng.randrange(len(paths))
        found = (f"{p}: {x.strip()}" for p in paths[start:] + paths[:start] for x in self.files[p] if name in x)
        return self._take(found, length)

    def _take(self, lines: Iterator[str] | Sequence[str], length: int) -> list[str]:
        found: list[str] = []
        num_left = length
        for line in lines:
            if num_left <= 0:
                break
            found.append(line)
            num_left -= self.num_tokens(line) + 1
        return found

    def _count(self, lines: Sequence[str]) -> int:
        return self.num_tokens("\n".join(lines))

    def _path(self) -> str:
        return self.rng.choice(list(self.files))

    def _name(self, text: str) -> str:
        return self.rng.choice(re.findall(r"\b[a-z]\w{4,}\b", text) or ["main"])

    def _length(self, mean: int, sigma: float) -> int:
        """Draw a length from a log-normal distribution, at most four times its mean."""
        return max(1, round(min(self.rng.lognormvariate(math.log(mean) - sigma**2 / 2, sigma), 4 * mean)))

    def _pause(self, factor: int) -> float:
        return round(self.rng.expovariate(1 / (factor * self.config.pause)), 2)


def read_sources() -> dict[str, list[str]]:
    """Return the lines of the modules of Python's standard library that have some, by name. Raises ValueError."""
    folder = Path(sysconfig.get_path("stdlib"))
    texts = {path.name: path.read_text(encoding="utf-8", errors="replace") for path in sorted(folder.glob("*.py"))}
    found = {name: text.splitlines() for name, text in texts.items() if text.count("\n") > 100}
    if not found:
        raise ValueError(f"{folder} has no sources to generate conversations from: give some by --recording")
    return found
