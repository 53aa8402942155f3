"""Encoding of answers in Anthropic's format: a message as one JSON object, or as named server-sent events."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from uuid import uuid4

from starlette.responses import Response

from retain.engine.request import FinishReason
from retain.processing.output import OutputProcessor
from retain.server.anthropic.content_blocks import ContentBlocks
from retain.server.anthropic.errors import create_request_id_header, to_error_json, to_error_response
from retain.server.exact_json import write_json
from retain.server.openai.chat_output import ChatOutputParser
from retain.server.openai.errors import APIError
from retain.server.openai.prompt_comparison import PromptChange, PromptComparison
from retain.server.openai.protocol import Json
from retain.server.openai.streaming import ResponseEncoder
from retain.server.request_group import OutputDelta, RequestGroup
from retain.server.tool_format import ChatOutput
from retain.server.usage import build_request_stats, count_tokens
from retain.server.warning_header import build_warning_header

MISS_REASONS = {
    PromptChange.TOOLS: "tools_changed",
    PromptChange.SYSTEM: "system_changed",
    PromptChange.MESSAGES: "messages_changed",
}


@dataclass(eq=False)
class MessagesEncoder(ResponseEncoder):
    """Encodes the answer of /v1/messages.

    `prompt_only` (max_tokens 0): leave out the output. `fills_context`: max_tokens was lowered to what fits.
    `warnings`: what of the request was left out. `comparison`: of the prompt with that of an earlier message.
    """

    parser: ChatOutputParser
    output_processor: OutputProcessor
    model_name: str
    prompt_only: bool = False
    fills_context: bool = False
    warnings: Sequence[str] = ()
    comparison: PromptComparison | None = None

    def __post_init__(self) -> None:
        self.headers = create_request_id_header() | build_warning_header(self.warnings)
        self._content = ContentBlocks()
        self._envelope: Json = {
            "id": f"msg_{uuid4().hex[:24]}",
            "type": "message",
            "role": "assistant",
            "model": self.model_name,
        }
        self._finish_reason: FinishReason | None = None
        self._group: RequestGroup | None = None  # of a stream whose first event is still to come

    @property
    def id(self) -> str:
        """The message's id, by which later requests name it."""
        return str(self._envelope["id"])

    def update(self, delta: OutputDelta) -> None:
        """Add newly generated text to the content blocks of the message."""
        self._feed(delta)

    def encode_full(self, group: RequestGroup) -> bytes:
        """Encode the whole message as one JSON object, with its usage."""
        self._content.close()
        message = self._describe(group) | {"content": self._content.blocks, **self._stop_fields(group)}
        return write_json(message | self._usage_fields(group))

    def encode_start(self, group: RequestGroup) -> bytes:
        """Encode nothing yet: the first event says how much of the prompt was cached, which the first delta knows."""
        self._group = group
        return b""

    def encode_delta(self, delta: OutputDelta) -> bytes:
        """Encode newly generated text as events of content blocks, behind the first events of the stream."""
        events = self._start_events()
        return b"".join(map(_encode_event, events + self._feed(delta)))

    def encode_end(self, group: RequestGroup) -> bytes:
        """Encode the events that close the content blocks and the message, with the stop reason and the usage."""
        end = {"type": "message_delta", "delta": self._stop_fields(group), **self._usage_fields(group)}
        events = [*self._start_events(), *self._content.close(), end, {"type": "message_stop"}]
        return b"".join(map(_encode_event, events))

    def encode_stream_error(self, error: APIError) -> bytes:
        """Encode the `error` event that ends a failed stream."""
        return _encode_event(to_error_json(error))

    def to_error_response(self, error: APIError) -> Response:
        """Return the HTTP response to a failed request, in Anthropic's form of errors."""
        return to_error_response(error)

    def _feed(self, delta: OutputDelta) -> list[Json]:
        self._finish_reason = delta.finish_reason
        if self.prompt_only:
            return []
        output: ChatOutput = self.parser.feed(delta.text, finished=delta.finish_reason is not None)
        return self._content.feed(output)

    def _start_events(self) -> list[Json]:
        """Return the first event of a stream, once."""
        if self._group is None:
            return []
        usage = self._usage_json(self._group) | {"output_tokens": 0}
        begun: Json = {"content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}
        message = self._describe(self._group) | begun
        self._group = None
        return [{"type": "message_start", "message": message}, {"type": "ping"}]

    def _describe(self, group: RequestGroup) -> Json:
        """Return the fields that are known from the beginning."""
        found = build_diagnostics(self.comparison, group) if self.comparison else None
        return self._envelope | {"diagnostics": found}

    def _stop_fields(self, group: RequestGroup) -> Json:
        stop_string = group.request_states[0].detokenizer.stop_string
        if self._finish_reason is not FinishReason.STOP:
            is_full = self.fills_context and not self.prompt_only
            reason = "model_context_window_exceeded" if is_full else "max_tokens"
        elif stop_string:
            reason = "stop_sequence"
        else:
            reason = "tool_use" if self._content.has_tool_calls else "end_turn"
        return {"stop_reason": reason, "stop_sequence": stop_string if reason == "stop_sequence" else None}

    def _usage_fields(self, group: RequestGroup) -> Json:
        return {"usage": self._usage_json(group), "retain": build_request_stats(self.output_processor, group)}

    def _usage_json(self, group: RequestGroup) -> Json:
        """Count tokens. What a breakpoint keeps in the cache counts as written, unless it was read from there."""
        counts = count_tokens(group)
        written = max((counts.pinned or 0) - counts.cached, 0)
        return {
            "input_tokens": counts.prompt - counts.cached - written,
            "cache_creation_input_tokens": written,
            "cache_read_input_tokens": counts.cached,
            "output_tokens": 0 if self.prompt_only else counts.output,
        }


def build_diagnostics(comparison: PromptComparison, group: RequestGroup) -> Json | None:
    """Return why the prompt could not go on from that of an earlier message; None where it does."""
    change = comparison.find_change(group.requests[0].stats.prefix_diagnosis)
    if change is None:
        return None
    if reason := MISS_REASONS.get(change):
        return {"cache_miss_reason": {"type": reason, "cache_missed_input_tokens": comparison.num_missed_tokens}}
    is_unknown = change is PromptChange.NOT_FOUND
    return {"cache_miss_reason": {"type": "previous_message_not_found" if is_unknown else "unavailable"}}


def _encode_event(event: Json) -> bytes:
    return b"event: " + event["type"].encode() + b"\ndata: " + write_json(event) + b"\n\n"
