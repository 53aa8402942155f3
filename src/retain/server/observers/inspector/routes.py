"""Serve the inspector: its page, the JSON that the page polls, and the playground."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import FileResponse, JSONResponse, RedirectResponse, Response

from retain.server.observers import EngineReader
from retain.server.observers.inspector.recorder import Recorder
from retain.server.openai.errors import APIError
from retain.server.preparation import PreparationPool

STATIC_FOLDER = Path(__file__).parent / "static"
SCRIPTS_AND_STYLES = ("common.js", "inspect.css", "inspect.js", "playground.js")
STATIC_FILES = {"": "inspect.html"} | {name: name for name in SCRIPTS_AND_STYLES}
OWN_SITES = ("none", "same-origin")  # values of Sec-Fetch-Site: the user typed the address, or this server linked to it
# The pages load nothing from other hosts, and no other page can embed them.
SECURITY_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'self'; script-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-cache",
}


class Inspector(Recorder):
    """Shows at /inspect what it has recorded."""

    def add_routes(self, app: FastAPI, engine: EngineReader, preparation: PreparationPool) -> None:
        """Add the routes under /inspect."""
        add_pages(app)
        add_records(app, self, engine, preparation)


def add_pages(app: FastAPI) -> None:
    """Add the routes of the pages and of what they load."""

    def serve_file(file_name: str) -> Any:
        async def send_file() -> FileResponse:
            return FileResponse(STATIC_FOLDER / file_name, headers=SECURITY_HEADERS)

        return send_file

    for path, name in STATIC_FILES.items():
        app.get(f"/inspect{'/' if path else ''}{path}", include_in_schema=False, response_model=None)(serve_file(name))

    @app.get("/inspect/playground", include_in_schema=False, response_model=None)
    async def send_playground(request: Request) -> Response:
        """Send the playground. A link of another site may fill in its form, but not run it."""
        if "run" in request.query_params and request.headers.get("sec-fetch-site") not in OWN_SITES:
            return RedirectResponse(f"?{request.url.remove_query_params('run').query}", 303)
        return FileResponse(STATIC_FOLDER / "playground.html", headers=SECURITY_HEADERS)


def add_records(app: FastAPI, recorder: Recorder, engine: EngineReader, preparation: PreparationPool) -> None:
    """Add the routes of the JSON that the pages poll."""

    @app.get("/inspect/state", include_in_schema=False, response_model=None)
    async def get_state(request: Request) -> JSONResponse:
        key = request.state.key
        request.state.admission.admit(1)  # its work is as long as the texts of the key's requests
        return JSONResponse(await engine.read(lambda: recorder.get_state(key.name, key.is_operator)))

    @app.get("/inspect/requests/{request_id}", include_in_schema=False, response_model=None)
    async def get_request(request_id: int, request: Request, layer: int | None = None) -> JSONResponse:
        key = request.state.key.name
        if layer is not None and layer not in recorder.caches:
            raise APIError(400, f"layer is one of {', '.join(map(str, recorder.caches))}", "layer")
        request.state.admission.admit(1)  # its work is as long as the request's text
        detail = await engine.read(lambda: recorder.get_request_detail(request_id, key, layer))
        return await preparation.run(key, lambda: _json_or_404(detail))

    @app.get("/inspect/requests/{request_id}/tokens/{position}", include_in_schema=False, response_model=None)
    async def get_token(request_id: int, position: int, request: Request) -> JSONResponse:
        key = request.state.key.name
        request.state.admission.admit(1)
        return _json_or_404(await engine.read(lambda: recorder.get_token_detail(request_id, key, position)))


def _json_or_404(detail: dict[str, Any] | None) -> JSONResponse:
    if detail is None:
        raise APIError(404, "request not found")
    return JSONResponse(detail)
