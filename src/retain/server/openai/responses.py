"""Answers in OpenAI's shapes.

`Choice` gathers one answer from its news; `ChatChoice` and `CompletionChoice` say it in their ways, in parts as a
stream wants them or whole. What is not known here: HTTP, engines.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from uuid import uuid4

from retain.engine.request import FinishReason, Logprob
from retain.processing import Tokenizer
from retain.server.engine_thread import OutputDelta
from retain.server.openai.tool_parser import ParsedToolCall, ToolParser

Json = dict[str, Any]


class ChoiceBuilder:
    """One answer, said as text. `echo`: after its prompt, of which the logprobs may be known."""

    def __init__(self, tokenizer: Tokenizer, index: int, wants_logprobs: bool):
        self.tokenizer, self.index, self.wants_logprobs = tokenizer, index, wants_logprobs
        self.text_deltas: list[str] = []
        self.num_tokens = 0
        self.logprobs: list[Logprob] = []
        self.finish_reason: FinishReason | None = None

    def update(self, delta: OutputDelta) -> None:
        """More of it."""
        self.text_deltas.append(delta.text)
        self.num_tokens += len(delta.token_ids)
        self.logprobs += delta.logprobs
        self.finish_reason = delta.finish_reason

    @property
    def finish_reason_str(self) -> str | None:
        """Why it ended."""
        return self.finish_reason.value if self.finish_reason else None

    def token_text(self, token_id: int) -> str:
        """A token as text."""
        return self.tokenizer.token_bytes(token_id).decode(errors="replace")


class CompletionChoiceBuilder(ChoiceBuilder):
    """Of /v1/completions. `echoed`: ids of a prompt that is said too; `known`: logprobs of its tokens but the first.
    `silent`: nothing but the prompt is said.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        index: int,
        wants_logprobs: bool,
        echo_token_ids: Sequence[int] | None,
        prompt_only: bool = False,
    ):
        super().__init__(tokenizer, index, wants_logprobs)
        self._text_offset = 0
        self.echo_token_ids, self.prompt_only = echo_token_ids, prompt_only

    def update(self, delta: OutputDelta) -> None:
        """More of it."""
        if self.prompt_only:
            delta = OutputDelta(delta.index, "", [], [], delta.finish_reason)
        super().update(delta)

    def build_echo_chunk(self, prompt_logprobs: Sequence[Logprob]) -> Json:
        """The prompt, said again."""
        assert self.echo_token_ids is not None
        text = self.tokenizer.decode(self.echo_token_ids)
        chunk = self._choice_json(text, None)
        if self.wants_logprobs:
            first = self.token_text(self.echo_token_ids[0])
            rest = self._logprobs_json(prompt_logprobs, len(first))
            chunk["logprobs"] = {
                "tokens": [first, *rest["tokens"]],
                "token_logprobs": [None, *rest["token_logprobs"]],
                "top_logprobs": [None, *rest["top_logprobs"]],
                "text_offset": [0, *rest["text_offset"]],
            }
        self._text_offset = len(text)
        return chunk

    def build_chunks(self, delta: OutputDelta) -> list[Json]:
        """What a stream says of it."""
        self.update(delta)
        text, logprobs = ("", []) if self.prompt_only else (delta.text, delta.logprobs)
        if not text and not delta.finish_reason and not logprobs:
            return []
        chunk = self._choice_json(text, self.finish_reason_str)
        if self.wants_logprobs:
            chunk["logprobs"] = self._logprobs_json(logprobs, self._text_offset)
            self._text_offset += sum(map(len, chunk["logprobs"]["tokens"]))
        return [chunk]

    def build(self, prompt_logprobs: Sequence[Logprob]) -> Json:
        """All of it."""
        before = self.build_echo_chunk(prompt_logprobs) if self.echo_token_ids is not None else None
        said = self._choice_json("".join(self.text_deltas), self.finish_reason_str)
        if self.wants_logprobs:
            said["logprobs"] = self._logprobs_json(self.logprobs, self._text_offset)
        if before:
            said["text"] = before["text"] + said["text"]
            if self.wants_logprobs:
                said["logprobs"] = {k: v + said["logprobs"][k] for k, v in before["logprobs"].items()}
        return said

    def _choice_json(self, text: str, finish_reason: str | None) -> Json:
        return {"index": self.index, "text": text, "logprobs": None, "finish_reason": finish_reason}

    def _logprobs_json(self, logprobs: Sequence[Logprob], offset: int) -> Json:
        out: Json = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for p in logprobs:
            piece = self.token_text(p.token_id)
            out["tokens"].append(piece)
            out["token_logprobs"].append(p.logprob)
            top = {
                self.token_text(t): x for t, x in reversed(p.top_logprobs)
            }  # of two that look alike, the likelier one
            out["top_logprobs"].append(top or {piece: p.logprob})
            out["text_offset"].append(offset)
            offset += len(piece)
        return out


class ChatChoiceBuilder(ChoiceBuilder):
    """Of /v1/chat/completions. An `ear` tells calls from what is said."""

    def __init__(self, tokenizer: Tokenizer, index: int, wants_logprobs: bool, tool_parser: ToolParser | None):
        super().__init__(tokenizer, index, wants_logprobs)
        self._tool_parser, self._num_tool_calls, self._has_started = tool_parser, 0, False

    def build_chunks(self, news: OutputDelta) -> list[Json]:
        """What a stream says of it."""
        self.update(news)
        text, calls = self._parse_tool_calls(news)
        delta: Json = {} if self._has_started else {"role": "assistant", "content": ""}
        if text:
            delta["content"] = text
        if calls:
            delta["tool_calls"] = [
                {"index": self._num_tool_calls + i, **_tool_call_json(c)} for i, c in enumerate(calls)
            ]
            self._num_tool_calls += len(calls)
        if not delta and not news.finish_reason and not news.logprobs:
            return []
        self._has_started = True
        return [self._choice_json({"delta": delta}, news.logprobs)]

    def build(self) -> Json:
        """All of it."""
        text, calls = self._parse_tool_calls(None)
        self._num_tool_calls = len(calls)
        message: Json = {"role": "assistant", "content": None if calls and not text.strip() else text, "refusal": None}
        if calls:
            message["tool_calls"] = [_tool_call_json(c) for c in calls]
        return self._choice_json({"message": message}, self.logprobs)

    def _parse_tool_calls(self, delta: OutputDelta | None) -> tuple[str, list[ParsedToolCall]]:
        """What is said and called of some news, or of everything."""
        text = delta.text if delta else "".join(self.text_deltas)
        if not self._tool_parser:
            return text, []
        said, calls = self._tool_parser.feed(text)
        if self.finish_reason:
            rest, more = self._tool_parser.close()
            said, calls = said + rest, calls + more
        return said, calls

    def _choice_json(self, payload: Json, logprobs: Sequence[Logprob]) -> Json:
        known = {"content": [self._logprob_json(p) for p in logprobs], "refusal": None} if self.wants_logprobs else None
        reason = (
            "tool_calls" if self._num_tool_calls and self.finish_reason is FinishReason.STOP else self.finish_reason_str
        )
        return {"index": self.index, **payload, "logprobs": known, "finish_reason": reason}

    def _logprob_json(self, p: Logprob) -> Json:
        top = [self._token_json(t, x) for t, x in p.top_logprobs]
        return {**self._token_json(p.token_id, p.logprob), "top_logprobs": top}

    def _token_json(self, token_id: int, logprob: float) -> Json:
        spelled = self.tokenizer.token_bytes(token_id)
        return {"token": spelled.decode(errors="replace"), "logprob": logprob, "bytes": list(spelled)}


def _tool_call_json(call: ParsedToolCall) -> Json:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": f"call_{uuid4().hex[:24]}", "type": "function", "function": function}
