"""Recorded conversations, for the bench of sessions: a file of them, and the requests that they were.

A line of the file is a conversation: `{"session": "7", "messages": [{"role": "user", "content": "..."}, ...]}`. Each
message of the assistant is an answer to a request with all messages before it. A later line of the same session goes on
where the two part: there its user went back to an earlier message, and said something else. A message may have a
`pause`, the seconds since the answer before it, and a `speaker`, the name of its tool. Roles and calls are written as
any chat template can show them: tools speak as users, calls are JSON in the text, and messages of one role in a row are
one message.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

from retain.files import quote
from retain.llm import LLM
from retain.processing.examples import read_records
from retain.sequences import count_common

Message = dict[str, Any]
ROLES = {"system": "system", "developer": "system", "user": "user", "tool": "user", "assistant": "assistant"}
USER_PAUSE = 10  # times the pause of a tool


@dataclass(frozen=True)
class RecordedConversation:
    """Messages of a session, each with its role and content, and some with a pause."""

    session: str
    messages: list[Message]


@dataclass(frozen=True)
class Turn:
    """A request of a session with its recorded answer, as ids, and the seconds since the answer before it."""

    prompt: list[int]
    answer: list[int]
    pause: float
    speaker: str = "user"  # what the request waited for: "user", or the name of a tool

    def num_known(self, before: Turn | None) -> int:
        """Return how many tokens of the prompt were computed in the turn before; its last token never was."""
        text = before.prompt + before.answer[:-1] if before else []
        return min(count_common(text, self.prompt), len(self.prompt) - 1)


# ---- files -----------------------------------------------------------------------------------------------------------


def read_conversations(path: Path) -> list[RecordedConversation]:
    """Return the conversations of a file. Raises ValueError or OSError."""
    found = []
    for number, record in read_records(path):
        place = f"{path}:{number}"
        messages = record.get("messages")
        if not isinstance(messages, list) or not all(isinstance(m, dict) for m in messages):
            raise ValueError(f"{place}: needs messages, a list of objects")
        found.append(RecordedConversation(str(record.get("session", number)), join_messages(messages, place)))
    return found


def write_conversations(path: Path, conversations: Iterable[RecordedConversation]) -> None:
    """Write conversations to a file."""
    lines = (json.dumps({"session": c.session, "messages": c.messages}) for c in conversations)
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def join_messages(messages: Iterable[Message], place: str) -> list[Message]:
    """Return messages whose roles alternate, with plain texts. Raises ValueError."""
    found: list[Message] = []
    for message in messages:
        role = ROLES.get(str(message.get("role")))
        pause = message.get("pause", 0.0)
        if role is None:
            raise ValueError(f"{place}: unknown role {quote(message.get('role'))}")
        if not isinstance(pause, (int, float)) or not 0 <= pause < 1e9:
            raise ValueError(f"{place}: a pause must be seconds, not {quote(pause)}")
        text = _to_text(message, place)
        if found and found[-1]["role"] == role:
            found[-1]["content"] += f"\n{text}"
        else:
            found.append({"role": role, "content": text})
        if speaker := message.get("speaker") or ("tool" if message["role"] == "tool" else None):
            found[-1]["speaker"] = str(speaker)
        if "pause" in message:  # of joined messages the last is what the next request waits for
            found[-1]["pause"] = pause
    return found


def _to_text(message: Message, place: str) -> str:
    content = message.get("content") or []
    parts = [{"text": content}] if isinstance(content, str) else content
    calls = message.get("tool_calls") or []
    if not isinstance(parts, list) or not isinstance(calls, list):
        raise ValueError(f"{place}: content must be a text or a list of parts, and tool_calls a list")
    texts = [part["text"] for part in parts if isinstance(part, dict) and isinstance(part.get("text"), str)]
    text = "\n".join([*texts, *(json.dumps(c.get("function", c) if isinstance(c, dict) else c) for c in calls)])
    if any("\ud800" <= c <= "\udfff" for c in text):
        raise ValueError(f"{place}: a text has half of a surrogate pair")
    return text


# ---- requests --------------------------------------------------------------------------------------------------------


def to_sessions(
    llm: LLM, conversations: Iterable[RecordedConversation], seed: int, mean_pause: float, max_len: int
) -> list[list[Turn]]:
    """Return the turns of each session, up to the first that exceeds `max_len` tokens.

    Sessions without one are left out. Pauses that conversations lack are drawn. Raises ValueError where there is none.
    """
    by_session: dict[str, list[RecordedConversation]] = {}
    for c in conversations:
        by_session.setdefault(c.session, []).append(c)
    sessions = []
    for name, parts in by_session.items():
        rng = random.Random(f"{seed} {name}")
        turns = list(_fitting(_to_turns(llm, parts, rng, mean_pause), max_len))
        sessions += [turns] if turns else []
    if not sessions:
        raise ValueError(f"no conversation has an answer within the context of {max_len} tokens")
    return sessions


def _fitting(turns: Iterator[Turn], max_len: int) -> Iterator[Turn]:
    return takewhile(lambda turn: len(turn.prompt) + len(turn.answer) <= max_len, turns)


def _to_turns(llm: LLM, parts: Sequence[RecordedConversation], rng: random.Random, mean_pause: float) -> Iterator[Turn]:
    before: list[Message] = []
    for conversation in parts:
        messages = conversation.messages
        num_common = count_common(before, messages)
        before = messages
        for i in range(max(num_common, 1), len(messages)):
            if messages[i]["role"] == "assistant" and messages[i]["content"]:
                pause = rng.expovariate(1 / mean_pause)
                prompt, answer = _encode_turn(llm, messages[:i], messages[i])
                if answer:  # a template may show a text of spaces as nothing
                    last = messages[i - 1]
                    yield Turn(prompt, answer, float(last.get("pause", pause)), last.get("speaker", "user"))


def _encode_turn(llm: LLM, before: list[Message], answer: Message) -> tuple[list[int], list[int]]:
    """Return a prompt and its answer as ids, with the token that ends the answer, if there is one."""
    tokenizer = llm.tokenizer
    if tokenizer.chat_template is None:
        prompt = tokenizer.encode("".join(f"{m['role']}: {m['content']}\n" for m in before) + "assistant:")
        return prompt, tokenizer.encode_continuation(f" {answer['content']}")
    plain = [{name: m[name] for name in ("role", "content")} for m in (*before, answer)]
    prompt = tokenizer.encode_chat(plain[:-1])
    whole = tokenizer.encode_chat(plain, add_generation_prompt=False)
    if whole[: len(prompt)] != prompt:  # the template shows an answer otherwise than it lets it be written
        return prompt, tokenizer.encode_continuation(answer["content"])
    rest = whole[len(prompt) :]
    end = next((i + 1 for i, token in enumerate(rest) if token in tokenizer.stop_token_ids), len(rest))
    return prompt, rest[:end]
