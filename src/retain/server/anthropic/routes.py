"""Routes of Anthropic's API: messages, and the number of tokens of their prompts."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
from fastapi import APIRouter, Request
from fastapi.responses import Response

from retain.kv.text import common_prefix_length
from retain.processing.input import GenerateRequest
from retain.server.anthropic.conversion import cut_at_breakpoints, to_chat_request
from retain.server.anthropic.encoder import MessagesEncoder
from retain.server.anthropic.errors import ERROR_RESPONSES, create_request_id_header
from retain.server.anthropic.protocol import (
    ConversationFields,
    CountTokensRequest,
    MessageResponse,
    MessagesRequest,
    TokenCount,
)
from retain.server.auth import ApiKey
from retain.server.openai.body import BodyRoute
from retain.server.openai.prompt_comparison import PromptFingerprints, build_fingerprint
from retain.server.openai.routes import describe_generation
from retain.server.openai.serving import OpenAIServing, Prepared
from retain.server.request_group import Pin
from retain.server.warning_header import warn_of


def create_router(service: OpenAIServing) -> APIRouter:
    """Create the routes for a served model."""
    router = APIRouter(prefix="/v1", responses=ERROR_RESPONSES, route_class=BodyRoute)
    fingerprints = PromptFingerprints()

    @router.post("/messages", response_model=None, responses=describe_generation(MessageResponse, "event"))
    async def messages(body: MessagesRequest, request: Request) -> Response:
        """Answer a conversation in Anthropic's format."""
        return await service.handle(body, request, lambda key: prepare_message(service, body, key, fingerprints))

    @router.post("/messages/count_tokens")
    async def count_tokens(body: CountTokensRequest, request: Request, response: Response) -> TokenCount:
        """Count the tokens of the prompt that a message request has."""
        service.check_model(body.model)
        response.headers.update(create_request_id_header())
        admission = request.state.admission
        encode = partial(_encode_prompt, service, body, admission.key_name)
        prompt = await service.run_admitted(admission, encode)
        return TokenCount(input_tokens=len(prompt))

    return router


def prepare_message(
    service: OpenAIServing, body: MessagesRequest, key: ApiKey, fingerprints: PromptFingerprints
) -> Prepared:
    """Prepare the request and the encoder of a message to generate. Raises APIError or ValueError."""
    request, (parser,), chat, turn = service.prepare_chat_request(to_chat_request(body), key)
    fingerprint = build_fingerprint(chat, request) if body.diagnostics else None
    comparison = None
    if fingerprint and body.diagnostics and (previous_id := body.diagnostics.previous_message_id):
        comparison = fingerprints.compare(key.name, previous_id, fingerprint)
        request = replace(request, explain_prefix=True)
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
            *chat.notes,
        ],
        comparison=comparison,
    )
    if fingerprint:
        fingerprints.put(key.name, encoder.id, fingerprint)
    return Prepared([request], encoder, find_pins(service, body, request, key.name), turn)


def find_pins(service: OpenAIServing, body: ConversationFields, request: GenerateRequest, key_name: str) -> list[Pin]:
    """Return how many tokens of the prompt its breakpoints pin, and for how long.

    Text up to a breakpoint is rendered alone; what it has in common with the prompt is pinned. If the template renders
    no such part of a conversation, nothing is.
    """
    pins = []
    for seconds, cut in cut_at_breakpoints(body).items():
        num_tokens = len(request.prompt)
        if cut is not None:
            try:
                begun = _encode_prompt(service, cut, key_name)
            except ValueError:
                continue
            num_tokens = common_prefix_length(np.asarray(begun), np.asarray(request.prompt))
        pins.append(Pin(min(seconds, service.limits.max_pin_seconds), num_tokens))
    return pins


def _encode_prompt(service: OpenAIServing, body: ConversationFields, key_name: str) -> list[int]:
    chat = service.chat_renderer.render_prompt(to_chat_request(body), key_name)
    return service.llm.tokenizer.encode(chat.prompt, add_special_tokens=False)
