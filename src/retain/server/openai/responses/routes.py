"""Routes of the Responses API: create a response, and find, list and delete stored ones."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Annotated, Literal

from fastapi import APIRouter, Query, Request
from fastapi.responses import Response

from retain.server.auth import ApiKey
from retain.server.openai.body import BodyRoute
from retain.server.openai.chat_output import ChatOutputParser
from retain.server.openai.errors import ERROR_RESPONSES, APIError
from retain.server.openai.prompt_comparison import PromptFingerprints, build_fingerprint
from retain.server.openai.protocol import Json
from retain.server.openai.render_routes import RenderedRequest, render_one
from retain.server.openai.responses.client_tools import ClientTools
from retain.server.openai.responses.conversion import convert_request, get_input_items, rename_parameter
from retain.server.openai.responses.encoder import ResponsesEncoder
from retain.server.openai.responses.history import (
    Conversation,
    build_turn,
    check_length,
    encode_items,
    encode_page,
    find_conversation,
)
from retain.server.openai.responses.protocol import DeletedResponse, ItemList, ResponseObject, ResponsesRequest
from retain.server.openai.responses.store import ResponseStore, StoredTurn
from retain.server.openai.routes import describe_generation
from retain.server.openai.serving import OpenAIServing, Prepared

NO_METHODS = ["HEAD", "OPTIONS", "PATCH", "PUT", "TRACE"]  # of any address here


def create_router(service: OpenAIServing, store: ResponseStore) -> APIRouter:  # noqa: C901 (the sum of its functions)
    """Create the routes for a served model."""
    router = APIRouter(prefix="/v1", responses=ERROR_RESPONSES, route_class=BodyRoute)
    fingerprints = PromptFingerprints()

    @router.post("/responses", response_model=None, responses=describe_generation(ResponseObject))
    async def create_response(body: ResponsesRequest, request: Request) -> Response:
        """Create a response to a text or to items."""
        service.check_model(body.model)
        key = request.state.key
        is_stored = body.store is not False

        def prepare(conversation: Conversation) -> Prepared:
            items = conversation.load_input()
            stored = encode_items(items) if is_stored else []

            def keep(response: Json, encoded: bytes) -> None:
                if is_stored:
                    turn = build_turn(stored, response["output"], encoded, conversation.previous)
                    store.put(key.name, response["id"], turn)

            converted = convert_request(body, [*conversation.load_history(), *items])
            generated, (parser,), chat, turn = service.prepare_chat_request(converted.chat, key)
            fingerprint = build_fingerprint(chat, generated)
            comparison = None
            if body.prompt_cache_options and (earlier_id := body.prompt_cache_options.comparison_response_id):
                comparison = fingerprints.compare(key.name, earlier_id, fingerprint)
                generated = replace(generated, explain_prefix=True)
            encoder = ResponsesEncoder(
                body,
                parser,
                service.llm.tokenizer,
                service.llm.output_processor,
                converted.tools,
                [*converted.warnings, *chat.notes],
                keep,
                comparison,
            )
            fingerprints.put(key.name, encoder.response["id"], fingerprint)
            return Prepared([generated], encoder, turn=turn)

        try:
            conversation = find_items(body, key)
            return await service.handle(body, request, lambda _: prepare(conversation))
        except APIError as error:
            if body.stream and error.code == "context_length_exceeded":
                return await service.preparation.run(key.name, partial(fail_stream, body, error))
            raise rename_parameter(error) from None

    def fail_stream(body: ResponsesRequest, error: APIError) -> Response:
        """Return a stream that only fails. OpenAI's server does so, and Codex CLI finds this error nowhere else."""
        llm = service.llm
        encoder = ResponsesEncoder(body, ChatOutputParser(), llm.tokenizer, llm.output_processor, ClientTools())
        return Response(encoder.encode_failed_stream(error), media_type="text/event-stream")

    @router.post("/responses/render", response_model=None, responses={200: {"model": RenderedRequest}})
    async def render_response(body: ResponsesRequest, request: Request) -> Response:
        """Return the token ids of the prompt that a response has."""
        service.check_model(body.model)
        key = request.state.key

        def prepare(conversation: Conversation) -> Prepared:
            items = [*conversation.load_history(), *conversation.load_input()]
            return service.prepare_chat(convert_request(body, items).chat, key)

        try:
            conversation = find_items(body, key)
            return await render_one(service, body, request, lambda _: prepare(conversation))
        except APIError as error:
            raise rename_parameter(error) from None

    def find_items(body: ResponsesRequest, key: ApiKey) -> Conversation:
        """Look up what a request refers to. Raises APIError where it is not there, or too much."""
        conversation = find_conversation(store, key.name, get_input_items(body), body.previous_response_id)
        check_length(conversation, service.limits.max_body_size)
        return conversation

    @router.api_route("/responses/render", methods=["GET", "DELETE", *NO_METHODS], include_in_schema=False)
    async def refuse_method_of_render() -> None:
        """Refuse every other method: `render` is no id of a response."""
        raise APIError(405, "Method Not Allowed", headers={"Allow": "POST"})

    def find(request: Request, response_id: str) -> StoredTurn:
        """Return a stored response of the request's key. Raises APIError, also where no work would be admitted."""
        request.state.admission.admit(1)
        if turn := store.get(request.state.key.name, response_id):
            return turn
        raise APIError(404, "response not found: it was never stored, deleted, or evicted", "response_id")

    @router.get("/responses/{response_id}", response_model=None, responses={200: {"model": ResponseObject}})
    async def get_response(response_id: str, request: Request, stream: bool = False) -> Response:
        """Return a stored response by its id."""
        if stream:
            raise APIError(400, "stream: stored responses are not streamed", "stream")
        return Response(find(request, response_id).response, media_type="application/json")

    @router.delete("/responses/{response_id}")
    async def delete_response(response_id: str, request: Request) -> DeletedResponse:
        """Delete a stored response. Responses that continue it keep its content."""
        find(request, response_id)
        store.delete(request.state.key.name, response_id)
        return DeletedResponse(id=response_id)

    # Starlette's own 405 names the methods of the first route of a path only.
    @router.api_route("/responses/{response_id}", methods=["POST", *NO_METHODS], include_in_schema=False)
    async def refuse_method(response_id: str) -> None:
        """Refuse methods other than GET and DELETE with status 405."""
        raise APIError(405, "Method Not Allowed", headers={"Allow": "GET, DELETE"})

    @router.get("/responses/{response_id}/input_items", response_model=None, responses={200: {"model": ItemList}})
    async def list_input_items(
        response_id: str,
        request: Request,
        after: str | None = None,
        limit: Annotated[int, Query(ge=1, le=100)] = 20,
        order: Literal["asc", "desc"] = "desc",
    ) -> Response:
        """List the items that a stored response answers, with those of the responses it continues."""
        turn = find(request, response_id)
        encode = partial(encode_page, turn, order == "desc", after, limit)
        page = await service.run_admitted(request.state.admission, encode)
        return Response(page, media_type="application/json")

    return router
