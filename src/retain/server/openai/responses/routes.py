"""Routes of the Responses API: create a response, and find, list and delete stored ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Literal

from fastapi import APIRouter, Query, Request
from fastapi.responses import Response

from retain.server.openai.body import BodyRoute
from retain.server.openai.chat_output import ChatOutputParser
from retain.server.openai.errors import ERROR_RESPONSES, APIError
from retain.server.openai.protocol import Json
from retain.server.openai.rendering import RenderedRequest, render_one
from retain.server.openai.responses.client_tools import ClientTools
from retain.server.openai.responses.conversion import (
    build_turn,
    convert_request,
    dump_items,
    get_input_items,
    iter_stored_items,
    rename_parameter,
    resolve_references,
)
from retain.server.openai.responses.encoder import ResponsesEncoder
from retain.server.openai.responses.items import InputItem, ItemReference
from retain.server.openai.responses.protocol import DeletedResponse, ItemList, ResponseObject, ResponsesRequest
from retain.server.openai.responses.store import ResponseStore, StoredTurn
from retain.server.openai.routes import describe_generation
from retain.server.openai.serving import OpenAIServing, Prepared

NO_METHODS = ["HEAD", "OPTIONS", "PATCH", "PUT", "TRACE"]  # of any address here


def create_router(service: OpenAIServing, store: ResponseStore) -> APIRouter:
    """Create the routes for a served model."""
    router = APIRouter(prefix="/v1", responses=ERROR_RESPONSES, route_class=BodyRoute)

    @router.post("/responses", response_model=None, responses=describe_generation(ResponseObject))
    async def create_response(body: ResponsesRequest, request: Request) -> Response:
        """Create a response to a text or to items."""
        service.check_model(body.model)
        key, is_stored = request.state.key, body.store is not False
        find_items = find_inputs(body, key.name)

        def prepare() -> Prepared:
            items, previous = find_items()
            dumped = dump_items(items) if is_stored else []

            def keep(response: Json, encoded: bytes) -> None:
                if is_stored:
                    store.put(key.name, response["id"], build_turn(dumped, response, encoded, previous))

            converted = convert_request(body, items, previous)
            generated, (parser,) = service.prepare_chat_request(converted.chat, key)
            encoder = ResponsesEncoder(
                body,
                parser,
                service.llm.tokenizer,
                service.llm.output_processor,
                converted.tools,
                converted.warnings,
                keep,
            )
            return Prepared([generated], encoder)

        try:
            return await service.handle(body, 1, request.state.admission, prepare)
        except APIError as error:
            if body.stream and error.code == "context_length_exceeded":
                return fail_stream(body, error)
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
        find_items = find_inputs(body, key.name)

        def prepare() -> Prepared:
            return service.prepare_chat(convert_request(body, *find_items()).chat, key)

        try:
            return await render_one(service, request.state.admission, body.model, prepare)
        except APIError as error:
            raise rename_parameter(error) from None

    @router.api_route("/responses/render", methods=["GET", "DELETE", *NO_METHODS], include_in_schema=False)
    async def refuse_method_of_render() -> None:
        """Refuse every other method: `render` is no id of a response."""
        raise APIError(405, "Method Not Allowed", headers={"Allow": "POST"})

    def find_inputs(body: ResponsesRequest, key_name: str) -> Callable[[], tuple[list[InputItem], StoredTurn | None]]:
        """Look up what a request names in the store; the items are read from it where the result is called."""
        items = get_input_items(body)
        previous = find_previous(key_name, body.previous_response_id) if body.previous_response_id else None
        referenced = find_referenced(key_name, items)
        return lambda: (resolve_references(items, referenced), previous)

    def find_referenced(key_name: str, items: Sequence[InputItem]) -> dict[str, StoredTurn]:
        """Return the turn of each item that is referenced, by the item's id."""
        turns = {}
        for item in items:
            if isinstance(item, ItemReference):
                turn = store.find_item(key_name, item.id)
                if turn is None:
                    message = "item not found: its response was never stored, deleted, or evicted; send the item"
                    raise APIError(400, message, "input", "item_not_found")
                turns[item.id] = turn
        return turns

    def find_previous(key_name: str, response_id: str) -> StoredTurn:
        if turn := store.get(key_name, response_id):
            return turn
        message = "previous response not found: it was never stored, deleted, or evicted; send the whole conversation"
        raise APIError(400, message, "previous_response_id", "previous_response_not_found")

    def find(request: Request, response_id: str) -> StoredTurn:
        if turn := store.get(request.state.key.name, response_id):
            return turn
        raise APIError(404, "response not found: it was never stored, deleted, or evicted", "response_id")

    @router.get("/responses/{response_id}", response_model=None, responses={200: {"model": ResponseObject}})
    async def get_response(response_id: str, request: Request, stream: bool = False) -> Response:
        """Get a stored response."""
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
        """Refuse every other method."""
        raise APIError(405, "Method Not Allowed", headers={"Allow": "GET, DELETE"})

    @router.get("/responses/{response_id}/input_items")
    async def list_input_items(
        response_id: str,
        request: Request,
        after: str | None = None,
        limit: Annotated[int, Query(ge=1, le=100)] = 20,
        order: Literal["asc", "desc"] = "desc",
    ) -> ItemList:
        """List the items that a stored response answers, with those of the responses it continues."""
        turn = find(request, response_id)
        items = await service.preparation.run(
            request.state.key.name, lambda: list(iter_stored_items(turn, with_output=False))
        )
        items = items if order == "asc" else items[::-1]
        if after is not None:
            ids = [item["id"] for item in items]
            if after not in ids:
                raise APIError(400, "after: no item has this id", "after")
            items = items[ids.index(after) + 1 :]
        page = items[:limit]
        first, last = (page[0]["id"], page[-1]["id"]) if page else (None, None)
        return ItemList(data=page, first_id=first, last_id=last, has_more=len(items) > limit)

    return router
