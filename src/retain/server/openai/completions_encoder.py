"""Encode the answers of completions and chat completions, full or as a stream of events."""

from __future__ import annotations

from collections.abc import Sequence
from time import time
from uuid import uuid4

import orjson

from retain.processing.output import OutputProcessor
from retain.server.openai.choice_builders import ChoiceBuilder
from retain.server.openai.errors import APIError
from retain.server.openai.protocol import Json, SamplingFields
from retain.server.openai.streaming import ResponseEncoder
from retain.server.request_group import OutputDelta, RequestGroup
from retain.server.usage import build_request_stats, count_tokens


class CompletionEncoder(ResponseEncoder):
    """Encodes the answers of /v1/completions and /v1/chat/completions.

    What a stream tells of usage, and whether token ids are returned, is the request's choice.
    """

    id_prefix = "cmpl-"
    object_name = "text_completion"
    chunk_object_name = "text_completion"

    def __init__(self, choices: Sequence[ChoiceBuilder], output_processor: OutputProcessor, body: SamplingFields):
        self.choices = choices
        self.output_processor = output_processor
        self.body = body
        self._group: RequestGroup | None = None  # of a stream
        self._unsent_token_ids: list[list[int]] = [[] for _ in choices]
        self._has_started = [False] * len(choices)
        self.envelope = {
            "id": f"{self.id_prefix}{uuid4().hex}",
            "object": self.chunk_object_name if body.stream else self.object_name,
            "created": int(time()),
            "model": body.model,
        }

    def update(self, delta: OutputDelta) -> None:
        """Add the newly generated text of a choice to the full answer."""
        self.choices[delta.index].update(delta)

    def encode_full(self, group: RequestGroup) -> bytes:
        """Encode the whole completion as one JSON object, with its usage, and token ids if the request wants them."""
        choices = [choice.build() for choice in self.choices]
        response: Json = {**self.envelope, "choices": choices, **self._final_fields(group)}
        if self.body.return_token_ids:
            for choice, json, request in zip(self.choices, choices, group.requests, strict=True):
                json["token_ids"] = request.output_tokens[: choice.num_tokens]
                self._add_prompt_token_ids(response, json, request.prompt)
        return orjson.dumps(response)

    def encode_start(self, group: RequestGroup) -> bytes:
        """Encode nothing, and keep the group of requests: the chunks of the stream count its tokens."""
        self._group = group
        return b""

    def encode_delta(self, delta: OutputDelta) -> bytes:
        """Encode newly generated text as chunks of the stream; empty if it adds nothing visible."""
        chunks = self.choices[delta.index].build_chunks(delta)
        events = [{**self.envelope, "choices": [chunk], **self._running_usage()} for chunk in chunks]
        if self.body.return_token_ids:
            self._add_token_ids(delta, events)
        return b"".join(map(_encode_event, events))

    def encode_end(self, group: RequestGroup) -> bytes:
        """Encode the chunk of the usage, if the request wants one, and `[DONE]`."""
        usage = b""
        if self.body.include_usage:
            usage = _encode_event({**self.envelope, "choices": [], **self._final_fields(group)})
        return usage + b"data: [DONE]\n\n"

    def encode_stream_error(self, error: APIError) -> bytes:
        """Encode the event that ends a failed stream, in OpenAI's form of errors."""
        return _encode_event(error.to_dict())

    def _running_usage(self) -> Json:
        """Build the field of a chunk that has the usage until now, where it is wanted."""
        if not self.body.include_usage:
            return {}
        return {"usage": self._build_usage(self._group) if self.body.continuous_usage and self._group else None}

    def _final_fields(self, group: RequestGroup) -> Json:
        return {"usage": self._build_usage(group), "retain": build_request_stats(self.output_processor, group)}

    def _build_usage(self, group: RequestGroup) -> Json:
        counts = count_tokens(group)
        num_output = sum(choice.num_tokens for choice in self.choices)  # 0 where only the prompt is wanted
        usage: Json = {
            "prompt_tokens": counts.prompt,
            "completion_tokens": num_output,
            "total_tokens": counts.prompt + num_output,
            "prompt_tokens_details": {"cached_tokens": counts.cached},
        }
        if counts.pinned is not None:
            usage["prompt_tokens_details"]["pinned_tokens"] = counts.pinned
        return usage

    def _add_token_ids(self, delta: OutputDelta, events: Sequence[Json]) -> None:
        """Add the ids of all tokens since the last event to the last one, and those of the prompt to the first."""
        unsent = self._unsent_token_ids[delta.index]
        unsent += delta.token_ids
        if not events:
            return
        if not self._has_started[delta.index] and self._group:
            self._has_started[delta.index] = True
            prompt = self._group.requests[delta.index].prompt
            self._add_prompt_token_ids(events[0], events[0]["choices"][0], prompt)
        for event in events:
            event["choices"][0]["token_ids"] = []
        events[-1]["choices"][0]["token_ids"] = unsent[:] if self.choices[delta.index].num_tokens else []
        unsent.clear()

    def _add_prompt_token_ids(self, response: Json, choice: Json, token_ids: list[int]) -> None:
        """Add the prompt to one choice: the choices of a completion may have several."""
        choice["prompt_token_ids"] = token_ids


def _encode_event(event: Json) -> bytes:
    return b"data: " + orjson.dumps(event) + b"\n\n"


class ChatCompletionEncoder(CompletionEncoder):
    """Encodes the answers of /v1/chat/completions."""

    id_prefix = "chatcmpl-"
    object_name = "chat.completion"
    chunk_object_name = "chat.completion.chunk"

    def _add_prompt_token_ids(self, response: Json, choice: Json, token_ids: list[int]) -> None:
        """Add the prompt to the response: all choices have the same."""
        response["prompt_token_ids"] = token_ids
