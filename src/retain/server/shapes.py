"""Answers in OpenAI's shapes.

`Choice` gathers one answer from its news; `ChatChoice` and `CompletionChoice` say it in their ways, in parts as a
stream wants them or whole. What is not known here: HTTP, engines.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from uuid import uuid4

from retain.engine.request import Logprob, FinishReason
from retain.server.calls import Call, Ear
from retain.server.worker import News
from retain.text import Tokenizer

Json = dict[str, Any]


class Choice:
    """One answer, said as text. `echo`: after its prompt, of which the logprobs may be known."""

    def __init__(self, tokenizer: Tokenizer, index: int, logprobs: bool):
        self.tokenizer, self.index, self.wants_logprobs = tokenizer, index, logprobs
        self.text: list[str] = []
        self.tokens = 0
        self.logprobs: list[Logprob] = []
        self.why: FinishReason | None = None

    def add(self, news: News) -> None:
        """More of it."""
        self.text.append(news.text)
        self.tokens += len(news.tokens)
        self.logprobs += news.logprobs
        self.why = news.why

    @property
    def reason(self) -> str | None:
        """Why it ended."""
        return self.why.value if self.why else None

    def piece(self, token: int) -> str:
        """A token as text."""
        return self.tokenizer.token_bytes(token).decode(errors="replace")


class CompletionChoice(Choice):
    """Of /v1/completions. `echoed`: ids of a prompt that is said too; `known`: logprobs of its tokens but the first.
    `silent`: nothing but the prompt is said.
    """

    def __init__(
        self, tokenizer: Tokenizer, index: int, logprobs: bool, echoed: Sequence[int] | None, silent: bool = False
    ):
        super().__init__(tokenizer, index, logprobs)
        self._offset = 0
        self.echoed, self.silent = echoed, silent

    def add(self, news: News) -> None:
        """More of it."""
        if self.silent:
            news = News(news.index, "", [], [], news.why)
        super().add(news)

    def echo(self, known: Sequence[Logprob]) -> Json:
        """The prompt, said again."""
        assert self.echoed is not None
        text = self.tokenizer.decode(self.echoed)
        chunk = self._said(text, None)
        if self.wants_logprobs:
            first = self.piece(self.echoed[0])
            rest = self._spelled(known, len(first))
            chunk["logprobs"] = {
                "tokens": [first, *rest["tokens"]],
                "token_logprobs": [None, *rest["token_logprobs"]],
                "top_logprobs": [None, *rest["top_logprobs"]],
                "text_offset": [0, *rest["text_offset"]],
            }
        self._offset = len(text)
        return chunk

    def part(self, news: News) -> list[Json]:
        """What a stream says of it."""
        self.add(news)
        text, logprobs = ("", []) if self.silent else (news.text, news.logprobs)
        if not text and not news.why and not logprobs:
            return []
        chunk = self._said(text, self.reason)
        if self.wants_logprobs:
            chunk["logprobs"] = self._spelled(logprobs, self._offset)
            self._offset += sum(map(len, chunk["logprobs"]["tokens"]))
        return [chunk]

    def whole(self, known: Sequence[Logprob]) -> Json:
        """All of it."""
        before = self.echo(known) if self.echoed is not None else None
        said = self._said("".join(self.text), self.reason)
        if self.wants_logprobs:
            said["logprobs"] = self._spelled(self.logprobs, self._offset)
        if before:
            said["text"] = before["text"] + said["text"]
            if self.wants_logprobs:
                said["logprobs"] = {k: v + said["logprobs"][k] for k, v in before["logprobs"].items()}
        return said

    def _said(self, text: str, reason: str | None) -> Json:
        return {"index": self.index, "text": text, "logprobs": None, "finish_reason": reason}

    def _spelled(self, logprobs: Sequence[Logprob], offset: int) -> Json:
        out: Json = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for p in logprobs:
            piece = self.piece(p.token_id)
            out["tokens"].append(piece)
            out["token_logprobs"].append(p.logprob)
            top = {self.piece(t): x for t, x in reversed(p.top_logprobs)}  # of two that look alike, the likelier one
            out["top_logprobs"].append(top or {piece: p.logprob})
            out["text_offset"].append(offset)
            offset += len(piece)
        return out


class ChatChoice(Choice):
    """Of /v1/chat/completions. An `ear` tells calls from what is said."""

    def __init__(self, tokenizer: Tokenizer, index: int, logprobs: bool, ear: Ear | None):
        super().__init__(tokenizer, index, logprobs)
        self._ear, self._calls, self._begun = ear, 0, False

    def part(self, news: News) -> list[Json]:
        """What a stream says of it."""
        self.add(news)
        text, calls = self._heard(news)
        delta: Json = {} if self._begun else {"role": "assistant", "content": ""}
        if text:
            delta["content"] = text
        if calls:
            delta["tool_calls"] = [{"index": self._calls + i, **_called(c)} for i, c in enumerate(calls)]
            self._calls += len(calls)
        if not delta and not news.why and not news.logprobs:
            return []
        self._begun = True
        return [self._said({"delta": delta}, news.logprobs)]

    def whole(self) -> Json:
        """All of it."""
        text, calls = self._heard(None)
        self._calls = len(calls)
        message: Json = {"role": "assistant", "content": None if calls and not text.strip() else text, "refusal": None}
        if calls:
            message["tool_calls"] = [_called(c) for c in calls]
        return self._said({"message": message}, self.logprobs)

    def _heard(self, news: News | None) -> tuple[str, list[Call]]:
        """What is said and called of some news, or of everything."""
        text = news.text if news else "".join(self.text)
        if not self._ear:
            return text, []
        said, calls = self._ear.hear(text)
        if self.why:
            rest, more = self._ear.close()
            said, calls = said + rest, calls + more
        return said, calls

    def _said(self, what: Json, logprobs: Sequence[Logprob]) -> Json:
        known = {"content": [self._spelled(p) for p in logprobs], "refusal": None} if self.wants_logprobs else None
        reason = "tool_calls" if self._calls and self.why is FinishReason.STOP else self.reason
        return {"index": self.index, **what, "logprobs": known, "finish_reason": reason}

    def _spelled(self, p: Logprob) -> Json:
        top = [self._token(t, x) for t, x in p.top_logprobs]
        return {**self._token(p.token_id, p.logprob), "top_logprobs": top}

    def _token(self, token: int, logprob: float) -> Json:
        spelled = self.tokenizer.token_bytes(token)
        return {"token": spelled.decode(errors="replace"), "logprob": logprob, "bytes": list(spelled)}


def _called(call: Call) -> Json:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": f"call_{uuid4().hex[:24]}", "type": "function", "function": function}
