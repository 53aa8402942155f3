"""Parsing of request bodies: in a thread, within bounds that are checked before any field is, up to the first error.

A body is read as JSON whatever its content-type says: `curl -d` calls it a form. Only a browser's request must say that
it is JSON, because then the browser asks this server before it lets a page of another origin send it.

A request has a place among those in flight, and room for its bytes, before its body is read. So a server that is full
reads no body: gateways repeat a refused request several times within a second.
"""

from __future__ import annotations

import asyncio
import codecs
import re
from collections.abc import Callable, Collection, Coroutine
from functools import partial
from itertools import chain
from typing import Annotated, Any

import orjson
from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import TypeAdapter, ValidationError
from starlette.datastructures import Headers
from starlette.responses import Response

from retain.files import shorten
from retain.server.admission import RequestAdmission
from retain.server.disconnects import run_while_connected
from retain.server.exact_json import parse_json
from retain.server.field_paths import find_field
from retain.server.openai.errors import APIError
from retain.server.preparation import PreparationPool
from retain.server.request_model import REFUSED_FIELD

JSON_TYPE = "application/json"
CONTENT_TYPE = b"content-type"

MAX_VALUES = 2**20  # in all lists and objects of a body: the token ids of the longest prompts
MAX_CONTAINERS = 2**17  # lists and objects: the garbage collector visits each of them several times
MAX_ITEMS = 2**14  # of a list that has more than numbers
MAX_KEYS = 2**12  # of an object
MAX_DEPTH = 200  # of lists and objects in each other: the JSON writer goes little deeper

STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\\?\Z)', re.DOTALL)  # or the rest, where none ends it

SMALL_BODY = 2**16  # bytes: parsed within milliseconds
# Two would parse no faster for a key, because parsing holds the interpreter's lock, and the event loop would wait for
# both.
PARSING_THREADS = 2
PARSING_THREADS_PER_KEY = 1


class BodyRoute(APIRoute):
    """A route that validates its body before FastAPI does, which then finds an instance of the model.

    The request's `state.admission` admits it before its body is read, and the application's `state.body_parser` parses
    it. Raises APIError.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return a handler that parses and validates the body before the route's function (FastAPI)."""
        handle = super().get_route_handler()
        if self.body_field is None:
            return handle
        field = self.body_field.field_info
        # With the metadata, such as what tells members of a union apart; None stands for none of it.
        annotation: Any = Annotated[field.annotation, None, *field.metadata]
        adapter: TypeAdapter[Any] = TypeAdapter(annotation)

        async def handle_validated(request: Request) -> Response:
            admission: RequestAdmission = request.state.admission
            parser: BodyParser = request.app.state.body_parser
            admission.admit(1)
            headers = Headers(scope=request.scope)  # `request.headers` would be kept, and they are changed below
            check_headers(headers)
            data = await read_body(request, int(headers.get("content-length", 0)), admission)
            # FastAPI asks the request for its JSON, which Starlette keeps here, if the content-type is JSON's.
            parsing = parser.parse(admission.key_name, data, adapter)
            try:
                async with asyncio.timeout_at(admission.deadline):
                    request._json = await run_while_connected(request.receive, parsing)
            except TimeoutError:
                raise APIError(408, "the request timed out") from None
            request._body = b"{}"  # it asks for these bytes before; those that came are freed
            others = [(name, value) for name, value in request.scope["headers"] if name != CONTENT_TYPE]
            request.scope["headers"] = [*others, (CONTENT_TYPE, JSON_TYPE.encode())]
            return await run_while_connected(request.receive, handle(request))

        return handle_validated


class BodyParser:
    """Parses bodies in threads, one body of a key at a time. Small ones do not wait for large ones."""

    def __init__(self) -> None:
        self._small = PreparationPool("parse", PARSING_THREADS, PARSING_THREADS_PER_KEY)
        self._large = PreparationPool("parse", PARSING_THREADS, PARSING_THREADS_PER_KEY)

    async def parse(self, key_name: str, data: bytearray, adapter: TypeAdapter[Any]) -> Any:
        """Return the validated body of a request of a key (see `parse_body`)."""
        pool = self._small if len(data) <= SMALL_BODY else self._large
        return await pool.run(key_name, partial(parse_body, data, adapter))

    def close(self) -> None:
        """End the worker processes; no body is parsed after this."""
        for pool in (self._small, self._large):
            pool.close()


async def read_body(request: Request, announced: int, admission: RequestAdmission) -> bytearray:
    """Return the bytes of a body. They are in flight before they are read: those announced, then those that came.

    Raises APIError where there is no room for them, and ClientDisconnect.
    """
    data = bytearray()
    admission.hold_bytes(announced)
    async for chunk in request.stream():
        if len(data) + len(chunk) > announced:
            admission.hold_bytes(len(data) + len(chunk))
        data += chunk
    return data


def check_headers(headers: Headers) -> None:
    """Raise APIError for a body that is compressed, or that a page of another origin may send unasked."""
    encoding = headers.get("content-encoding", "identity")
    if encoding.strip().lower() != "identity":
        message = f"content-encoding {shorten(encoding, 40)} is not supported: send the body uncompressed"
        raise APIError(415, message, headers={"Accept-Encoding": "identity"})
    media_type = headers.get("content-type", "").partition(";")[0].strip().lower()
    if "origin" in headers and media_type != JSON_TYPE:
        raise APIError(415, f"a browser must send content-type: {JSON_TYPE}")


def parse_body(data: bytes | bytearray, adapter: TypeAdapter[Any]) -> Any:
    """Return the validated body. Raises RequestValidationError with one error.

    A bytearray is empty afterwards, so that its text is held twice for no longer than it is parsed.
    """
    try:
        value = parse_json_object(data)
    finally:
        if isinstance(data, bytearray):
            data.clear()
    if problem := find_excess(value):
        raise _invalid(f"the request body has {problem}")
    try:
        return adapter.validate_python(value)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        if first["type"] == REFUSED_FIELD:  # an error of the object: only its context names the field
            first["loc"] = (*first["loc"], first["ctx"]["field"])
        first["loc"] = find_field(adapter.core_schema, first["loc"])
        raise RequestValidationError([first], body=value) from None


def parse_json_object(data: bytes | bytearray) -> dict[str, Any]:
    """Return the JSON object of a body, which may begin with a byte order mark. Raises RequestValidationError."""
    if not data:
        raise _invalid("the request body is empty: send a JSON object")
    if problem := find_excess_of_text(data):
        raise _invalid(f"the request body has {problem}")
    try:
        with memoryview(data)[len(codecs.BOM_UTF8) * data.startswith(codecs.BOM_UTF8) :] as text:
            value = parse_json(text)
    except orjson.JSONDecodeError:
        try:
            data.decode()
        except UnicodeDecodeError as error:
            raise _invalid(f"the request body is not UTF-8 text: byte {error.start} is not") from None
        raise _invalid("the request body is not valid JSON") from None
    if not isinstance(value, dict):
        raise _invalid("the request body is JSON, but no object: send {...}")
    return value


def _invalid(message: str) -> RequestValidationError:
    return RequestValidationError([{"type": "value_error", "loc": (), "msg": message}])


def find_excess_of_text(data: bytes | bytearray) -> str | None:
    """Return which bound a JSON text exceeds, in words; None if none.

    Nothing else runs while the text is parsed, so what is too much must not be: 8 MiB of empty lists take seconds.
    """
    if data.count(b"[") + data.count(b"{") <= MAX_CONTAINERS and data.count(b",") <= MAX_VALUES:
        return None
    num_containers = 0
    num_commas = 0
    position = 0
    for start, end in chain((match.span() for match in STRING.finditer(data)), [(len(data), len(data))]):
        between = data[position:start]
        num_containers += between.count(b"[") + between.count(b"{")
        num_commas += between.count(b",")
        position = end
        if num_containers > MAX_CONTAINERS:
            return f"more than {MAX_CONTAINERS} lists and objects"
        if num_commas > MAX_VALUES:
            return f"more than {MAX_VALUES} values"
    return None


def find_excess(value: Any) -> str | None:
    """Return which bound a JSON value exceeds, in words; None if none."""
    items: Collection[Any]
    containers = [(value, 1)]
    num_values = 0
    while containers:
        x, depth = containers.pop()
        if depth > MAX_DEPTH:
            return f"lists and objects nested more than {MAX_DEPTH} deep"
        if isinstance(x, dict):
            if len(x) > MAX_KEYS:
                return f"an object of {len(x)} keys: at most {MAX_KEYS}"
            items = x.values()
        elif isinstance(x, list):
            if len(x) > MAX_ITEMS and any(type(item) is not int for item in x):
                return f"a list of {len(x)} items: at most {MAX_ITEMS}, unless all are integers"
            items = x
        else:
            continue
        num_values += len(x)
        if num_values > MAX_VALUES:
            return f"more than {MAX_VALUES} values"
        containers += [(item, depth + 1) for item in items if isinstance(item, dict | list)]
    return None


def count_values(value: Any) -> int:
    """Return the number of values in the lists and objects of a JSON value, as MAX_VALUES bounds them."""
    containers = [value]
    num_values = 0
    while containers:
        x = containers.pop()
        num_values += len(x)
        containers += [item for item in (x.values() if isinstance(x, dict) else x) if isinstance(item, dict | list)]
    return num_values


def parse_arguments(text: str) -> Any:
    """Return the JSON value of a call's arguments. Raises ValueError for text that is none, or of no body's bounds.

    Python's own parser returns values that the JSON writer refuses: halves of surrogate pairs, NaN, and lists and
    objects nested a thousand deep.
    """
    value = parse_json(text.encode())
    if problem := find_excess(value):
        raise ValueError(problem)
    return value
