"""Adapters that come and go: POST /v1/load_lora_adapter and /v1/unload_lora_adapter, as vLLM's server has them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from fastapi import APIRouter, Request
from pydantic import BaseModel, Field

from retain.formats.lora import read_lora
from retain.server.openai.body import BodyRoute
from retain.server.openai.errors import ERROR_RESPONSES, check_operator
from retain.server.openai.serving import OpenAIServing
from retain.server.request_model import StrictModel

LoraName = Annotated[str, Field(min_length=1, max_length=256, description="The name that requests give as `model`")]


class LoraFolder(StrictModel):
    """An adapter and its folder on the server: LoadLoRAAdapterRequest in vLLM."""

    lora_name: LoraName
    lora_path: Annotated[str, Field(min_length=1, description="A folder on the server, in PEFT's layout")]


class LoraChoice(StrictModel):
    """An adapter: UnloadLoRAAdapterRequest in vLLM."""

    lora_name: LoraName


class LoraNames(BaseModel):
    """The adapters that requests may name."""

    loras: list[str]


def create_router(service: OpenAIServing) -> APIRouter:
    """Create the routes for a server that allows updates. Only operators may use them."""
    router = APIRouter(prefix="/v1", responses=ERROR_RESPONSES, route_class=BodyRoute)
    adapters = service.llm.input_processor.adapters

    def list_names() -> LoraNames:
        return LoraNames(loras=list(adapters.named))

    @router.post("/load_lora_adapter")
    async def load(body: LoraFolder, request: Request) -> LoraNames:
        """Load an adapter. Requests that name another go on."""
        check_operator(request.state.key, "change adapters")
        service.check_lora_name(body.lora_name)
        async with service.admit(request.state.admission, "lora_path"):
            lora = await service.preparation.run(request.state.key.name, lambda: read_lora(Path(body.lora_path)))
            await service.engine_thread.call(lambda: adapters.add(body.lora_name, lora))
        return list_names()

    @router.post("/unload_lora_adapter")
    async def unload(body: LoraChoice, request: Request) -> LoraNames:
        """Let no further request name an adapter; others go on with it."""
        check_operator(request.state.key, "change adapters")
        async with service.admit(request.state.admission, "lora_name"):
            await service.engine_thread.call(lambda: adapters.remove(body.lora_name))
        return list_names()

    return router
