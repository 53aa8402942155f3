"""The inspector's addresses: its page, and what the page asks for. What is not known here: what is shown."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import FileResponse, JSONResponse

from retain.server.errors import Refused
from retain.server.inspector import Inspector
from retain.server.worker import Worker

PAGE = Path(__file__).parent / "page"
FILES = {"": "inspect.html", "inspect.css": "inspect.css", "inspect.js": "inspect.js"}
# Nothing is loaded from elsewhere, and nobody else's page shows this one.
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'self'; script-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-cache",
}


def routes(api: FastAPI, worker: Worker, inspector: Inspector) -> None:
    """Under /inspect."""

    def page(name: str) -> Any:
        async def file() -> FileResponse:
            return FileResponse(PAGE / name, headers=HEADERS)

        return file

    for path, name in FILES.items():
        api.get(f"/inspect{'/' if path else ''}{path}", include_in_schema=False, response_model=None)(page(name))

    @api.get("/inspect/state", include_in_schema=False, response_model=None)
    async def state(request: Request) -> JSONResponse:
        key = request.state.key.name
        return JSONResponse(await worker.call(lambda: inspector.state(key)))

    @api.get("/inspect/requests/{number}", include_in_schema=False, response_model=None)
    async def look(number: int, request: Request, layer: int | None = None) -> JSONResponse:
        key = request.state.key.name
        if layer is not None and not 0 <= layer < inspector.llm.spec.num_layers:
            raise Refused(400, f"layers are 0 to {inspector.llm.spec.num_layers - 1}", "layer")
        found = await worker.call(lambda: inspector.look(number, key, layer))
        return _there(found)

    @api.get("/inspect/requests/{number}/tokens/{place}", include_in_schema=False, response_model=None)
    async def token(number: int, place: int, request: Request) -> JSONResponse:
        key = request.state.key.name
        return _there(await worker.call(lambda: inspector.token(number, key, place)))


def _there(found: dict[str, Any] | None) -> JSONResponse:
    if found is None:
        raise Refused(404, "there is no such request, or no more")
    return JSONResponse(found)
