"""Preparation of message requests: the chat completion, what is to be pinned, and the encoder of the answer."""

from __future__ import annotations

import numpy as np

from retain.kv.prefix.block_hash import common_prefix_length
from retain.processing.input import GenerateRequest
from retain.server.anthropic.conversion import cut_at_breakpoints, to_chat_request
from retain.server.anthropic.encoder import MessagesEncoder
from retain.server.anthropic.protocol import ConversationFields, MessagesRequest
from retain.server.auth import ApiKey
from retain.server.openai.serving import OpenAIServing, Prepared
from retain.server.request_group import Pin
from retain.server.warning_header import warn_of


def prepare_message(service: OpenAIServing, body: MessagesRequest, key: ApiKey) -> Prepared:
    """Prepare a message. Raises APIError or ValueError."""
    request, (parser,) = service.prepare_chat_request(to_chat_request(body), key)
    fits = service.llm.input_processor.max_output_tokens(request, len(request.prompt))
    encoder = MessagesEncoder(
        parser,
        service.llm.output_processor,
        body.model,
        prompt_only=body.max_tokens == 0,
        fills_context=body.max_tokens > fits == request.params.max_tokens,
        warnings=[
            *warn_of("tools", (tool.kind for tool in body.left_out_tools)),
            *warn_of("MCP servers", (server.name for server in body.mcp_servers or ())),
        ],
    )
    return Prepared([request], encoder, find_pins(service, body, request))


def count_prompt_tokens(service: OpenAIServing, body: ConversationFields) -> int:
    """Count the tokens of a conversation as a prompt. Raises APIError or ValueError."""
    return len(_encode_prompt(service, body))


def find_pins(service: OpenAIServing, body: ConversationFields, request: GenerateRequest) -> list[Pin]:
    """Return how many tokens of the prompt its breakpoints pin, and for how long.

    Text up to a breakpoint is rendered alone; what it has in common with the prompt is pinned. If the template renders
    no such part of a conversation, nothing is.
    """
    pins = []
    for seconds, cut in cut_at_breakpoints(body).items():
        num_tokens = len(request.prompt)
        if cut is not None:
            try:
                begun = _encode_prompt(service, cut)
            except ValueError:
                continue
            num_tokens = common_prefix_length(np.asarray(begun), np.asarray(request.prompt))
        pins.append(Pin(min(seconds, service.limits.max_pin_seconds), num_tokens))
    return pins


def _encode_prompt(service: OpenAIServing, body: ConversationFields) -> list[int]:
    prompt, _ = service.render_chat(to_chat_request(body))
    return service.llm.tokenizer.encode(prompt, add_special_tokens=False)
