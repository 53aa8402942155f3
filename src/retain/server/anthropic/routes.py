"""Routes of Anthropic's API: messages, and the number of tokens of their prompts."""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import Response

from retain.server.anthropic.errors import ERROR_RESPONSES, create_request_id_header
from retain.server.anthropic.protocol import CountTokensRequest, MessageResponse, MessagesRequest, TokenCount
from retain.server.anthropic.serving import count_prompt_tokens, prepare_message
from retain.server.openai.body import BodyRoute
from retain.server.openai.serving import OpenAIServing

EVENT = {
    "type": "object",
    "properties": {"event": {"type": "string"}, "data": {"type": "string"}},
    "required": ["event", "data"],
}
MESSAGE_RESPONSES = {200: {"model": MessageResponse, "content": {"text/event-stream": {"schema": EVENT}}}}


def create_router(service: OpenAIServing) -> APIRouter:
    """Create the routes for a served model."""
    router = APIRouter(prefix="/v1", responses=ERROR_RESPONSES, route_class=BodyRoute)

    @router.post("/messages", response_model=None, responses=MESSAGE_RESPONSES)  # type: ignore[arg-type]
    async def messages(body: MessagesRequest, request: Request) -> Response:
        """Answer a conversation in Anthropic's format."""
        service.check_model(body.model)
        key = request.state.key
        return await service.handle(body, 1, request.state.admission, lambda: prepare_message(service, body, key))

    @router.post("/messages/count_tokens")
    async def count_tokens(body: CountTokensRequest, request: Request, response: Response) -> TokenCount:
        """Count the tokens of the prompt that a message request has."""
        service.check_model(body.model)
        response.headers.update(create_request_id_header())
        num_tokens = await service.run_admitted(request.state.admission, lambda: count_prompt_tokens(service, body))
        return TokenCount(input_tokens=num_tokens)

    return router
