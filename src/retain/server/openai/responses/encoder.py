"""Encode the answers of /v1/responses: a response object, or the events of a stream that ends with it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import time

import orjson
from starlette.responses import Response

from retain.engine.request import FinishReason, Logprob
from retain.processing.output import OutputProcessor
from retain.processing.tokenizer import Tokenizer
from retain.server.exact_json import write_json
from retain.server.openai.chat_output import ChatOutputParser
from retain.server.openai.choice_builders import to_token_logprob
from retain.server.openai.errors import APIError
from retain.server.openai.prompt_comparison import PromptChange, PromptComparison
from retain.server.openai.protocol import Json
from retain.server.openai.responses.client_tools import ClientTools
from retain.server.openai.responses.conversion import rename_parameter
from retain.server.openai.responses.items import create_id
from retain.server.openai.responses.output import OutputItems
from retain.server.openai.responses.protocol import ResponsesRequest
from retain.server.openai.responses.tools import HostedTool
from retain.server.openai.streaming import ResponseEncoder
from retain.server.request_group import OutputDelta, RequestGroup
from retain.server.tool_format import ChatOutput
from retain.server.usage import build_request_stats, count_tokens
from retain.server.warning_header import build_warning_header

MISS_REASONS = {
    PromptChange.SALT: "prompt_cache_key_changed",
    PromptChange.TOOLS: "tools_changed",
    PromptChange.SYSTEM: "input_changed",
    PromptChange.EFFORT: "reasoning_effort_changed",
    PromptChange.MESSAGES: "input_changed",
}


@dataclass(eq=False)
class ResponsesEncoder(ResponseEncoder):
    """Encodes the answer to one request. Calls `on_finish` with the response, also as JSON, before it is sent.

    `tools`: those that the model may call. `warnings`: what of the request was left out. `comparison`: of the prompt
    with that of an earlier response.
    """

    body: ResponsesRequest
    parser: ChatOutputParser
    tokenizer: Tokenizer
    output_processor: OutputProcessor
    tools: ClientTools
    warnings: Sequence[str] = ()
    on_finish: Callable[[Json, bytes], None] = lambda response, encoded: None
    comparison: PromptComparison | None = None

    def __post_init__(self) -> None:
        self.response = build_response(self.body)
        self.headers = build_warning_header(self.warnings)
        self._output = OutputItems(self.tools, self.body.wants_encrypted_reasoning)
        self._finish_reason = FinishReason.STOP
        self._token_ids: list[int] = []
        self._logprobs: list[Logprob] = []  # of tokens whose text may still become content
        self._has_reasoning = False
        self._is_past_reasoning = False
        self._num_reasoning_tokens = 0
        self._sequence_number = 0

    def update(self, delta: OutputDelta) -> None:
        """Add newly generated text to the items of the full response."""
        self._add(delta)

    def encode_full(self, group: RequestGroup) -> bytes:
        """Encode the whole response as one JSON object, and pass it to `on_finish`."""
        self._finish_items()
        return self._finish_response(group)

    def encode_start(self, group: RequestGroup) -> bytes:
        """Encode the events that say that the response is created and in progress."""
        return self._encode_created()

    def encode_failed_stream(self, error: APIError) -> bytes:
        """Encode a whole stream for a request that failed before its stream began."""
        return self._encode_created() + self.encode_stream_error(error)

    def encode_delta(self, delta: OutputDelta) -> bytes:
        """Encode the events of the stream for newly generated text."""
        return self._encode_events(self._add(delta))

    def encode_end(self, group: RequestGroup) -> bytes:
        """Encode the events that close the items, and the one with the finished response, which goes to `on_finish`."""
        data = self._encode_events(self._finish_items())
        response = orjson.Fragment(self._finish_response(group))
        return data + self._encode_events([{"type": f"response.{self.response['status']}", "response": response}])

    def encode_stream_error(self, error: APIError) -> bytes:
        """Encode the events `error` and `response.failed`, which end a failed stream."""
        error = rename_parameter(error)
        fields = {"code": error.code or "server_error", "message": error.message}
        self._output.close("incomplete")
        self.response |= {"status": "failed", "error": fields, "output": self._output.items}
        return self._encode_events(
            [
                {"type": "error", **fields, "param": error.param},
                {"type": "response.failed", "response": self.response},
            ]
        )

    def to_error_response(self, error: APIError) -> Response:
        """Return the HTTP response to a failed request, which names its parameter as /v1/responses does."""
        return rename_parameter(error).to_response()

    def _encode_created(self) -> bytes:
        names = ("response.created", "response.in_progress")
        return self._encode_events([{"type": name, "response": self.response} for name in names])

    def _encode_events(self, events: Sequence[Json]) -> bytes:
        encoded = []
        for event in events:
            data = write_json({**event, "sequence_number": self._sequence_number})
            encoded.append(f"event: {event['type']}\ndata: ".encode() + data + b"\n\n")
            self._sequence_number += 1
        return b"".join(encoded)

    def _add(self, delta: OutputDelta) -> list[Json]:
        if not self.body.generates:
            return []  # the one token that comes with a prompt is nobody's
        self._finish_reason = delta.finish_reason or FinishReason.STOP
        self._token_ids += delta.token_ids
        output = self.parser.feed(delta.text, delta.finish_reason is not None)
        if self.body.wants_logprobs:
            self._logprobs += delta.logprobs
        self._has_reasoning |= bool(output.reasoning)
        if output.content or output.tool_calls:
            self._end_reasoning()
        return self._output.add(output, self._take_logprobs(output))

    def _end_reasoning(self) -> None:
        """Count the reasoning tokens, once the first token after them is known or the answer ends."""
        if self._has_reasoning and not self._is_past_reasoning:
            self._num_reasoning_tokens = count_reasoning_tokens(self.tokenizer, self.parser, self._token_ids)
            del self._logprobs[: self._num_reasoning_tokens]
        self._is_past_reasoning = True

    def _take_logprobs(self, output: ChatOutput) -> list[Json]:
        """Return the log-probabilities of the tokens so far if they became content; those of calls are left out."""
        logprobs = [] if output.tool_calls or not output.content else self._logprobs
        if output.tool_calls or output.content:
            self._logprobs = []
        special = self.tokenizer.special_token_ids  # which the text leaves out
        return [to_token_logprob(self.tokenizer, p) for p in logprobs if p.token_id not in special]

    def _finish_items(self) -> list[Json]:
        if not self.body.generates:
            self.response["status"] = "completed"
            return []
        self._end_reasoning()
        is_cut = self._finish_reason is FinishReason.LENGTH
        self.response["status"] = "incomplete" if is_cut else "completed"
        return self._output.finish(self.response["status"])

    def _finish_response(self, group: RequestGroup) -> bytes:
        is_cut = self.response["status"] == "incomplete"
        self.response |= {
            "completed_at": None if is_cut else int(time()),
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "output": self._output.items,
            "usage": self._build_usage(group),
            "prompt_cache_diagnostics": build_diagnostics(self.comparison, group) if self.comparison else None,
            "retain": build_request_stats(self.output_processor, group)[0],
        }
        encoded = write_json(self.response)
        self.on_finish(self.response, encoded)
        return encoded

    def _build_usage(self, group: RequestGroup) -> Json:
        counts = count_tokens(group)
        num_output_tokens = counts.output if self.body.generates else 0
        details = {"cached_tokens": counts.cached}
        if counts.pinned is not None:
            details["pinned_tokens"] = counts.pinned
        return {
            "input_tokens": counts.prompt,
            "input_tokens_details": details,
            "output_tokens": num_output_tokens,
            "output_tokens_details": {"reasoning_tokens": self._num_reasoning_tokens},
            "total_tokens": counts.prompt + num_output_tokens,
        }


def build_response(body: ResponsesRequest) -> Json:
    """Build the response to a request before anything is generated. It repeats the request's fields.

    Those of any length are encoded here, once: this runs in a thread, and what sends them in the event loop.
    """
    wanted = body.text.format if body.text else None
    choice = body.tool_choice or "auto"
    repeated = {
        "instructions": body.instructions,
        "metadata": body.metadata or {},
        "text": {"format": wanted.model_dump(by_alias=True) if wanted else {"type": "text"}},
        "tool_choice": choice if isinstance(choice, str) else choice.model_dump(),
        "tools": [tool.model_dump() for tool in body.tools or () if not isinstance(tool, HostedTool)],
    }
    return {
        "id": create_id("resp"),
        "object": "response",
        "created_at": int(time()),
        "completed_at": None,
        "status": "in_progress",
        "background": False,
        "error": None,
        "incomplete_details": None,
        "max_output_tokens": body.max_output_tokens,
        "model": body.model,
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "reasoning": {"effort": body.reasoning.effort if body.reasoning else None, "summary": None},
        "safety_identifier": body.safety_identifier,
        "service_tier": "default",
        "store": body.store is not False,
        "temperature": 1.0 if body.temperature is None else body.temperature,
        "top_logprobs": body.top_logprobs or 0,
        "top_p": 1.0 if body.top_p is None else body.top_p,
        "truncation": "disabled",
        "usage": None,
        "prompt_cache_diagnostics": None,
        "user": body.user,
        "retain": None,
        **{name: orjson.Fragment(write_json(value)) for name, value in repeated.items()},
    }


def build_diagnostics(comparison: PromptComparison, group: RequestGroup) -> Json:
    """Return whether the prompt goes on from that of an earlier response, and if not, why."""
    change = comparison.find_change(group.requests[0].stats.prefix_diagnosis)
    if change is None:
        return {"type": "cache_hit"}
    if reason := MISS_REASONS.get(change):
        return {"type": "cache_miss", "reason": reason, "cache_missed_tokens": comparison.num_missed_tokens}
    return {"type": "comparison_response_not_found" if change is PromptChange.NOT_FOUND else "unavailable"}


def count_reasoning_tokens(tokenizer: Tokenizer, parser: ChatOutputParser, token_ids: Sequence[int]) -> int:
    """Return the tokens up to the end of the reasoning, what marks it included; all if it is not closed."""
    low = 0  # binary search: a longer answer has left its reasoning if a shorter one has
    high = len(token_ids)
    while low < high:
        middle = (low + high) // 2
        text = b"".join(map(tokenizer.token_bytes, token_ids[:middle])).decode(errors="replace")
        if parser.has_left_reasoning(text):
            high = middle
        else:
            low = middle + 1
    return low
