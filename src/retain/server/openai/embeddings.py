"""OpenAI's embeddings: a vector of each text, as the model's files say that it pools."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Sequence
from functools import partial
from typing import Annotated, ClassVar, Literal

import numpy as np
from fastapi import APIRouter, Request
from fastapi.responses import Response
from numpy.typing import NDArray
from pydantic import BaseModel, Discriminator, Field, Tag
from torch import Tensor

from retain.processing.input import GenerateRequest, Prompt, list_prompts
from retain.processing.pooling import PooledPlan, plan_vectors
from retain.server.auth import ApiKey
from retain.server.openai.body import BodyRoute
from retain.server.openai.errors import ERROR_RESPONSES, APIError
from retain.server.openai.pooled_calls import MAX_TEXTS, PooledFields, PooledUsage, answer_pooled
from retain.server.openai.protocol import Json, NonEmptyStr, PositiveCount, TokenIds, tag_prompt
from retain.server.openai.serving import OpenAIServing, compose_salt


class EmbeddingRequest(PooledFields):
    """POST /v1/embeddings."""

    prompt_field: ClassVar[str] = "input"
    operation: ClassVar[str] = "embeddings"

    input: Annotated[
        Annotated[NonEmptyStr, Tag("<text>")]
        | Annotated[list[NonEmptyStr], Field(min_length=1, max_length=MAX_TEXTS, fail_fast=True), Tag("<texts>")]
        | Annotated[TokenIds, Tag("<ids>")]
        | Annotated[list[TokenIds], Field(min_length=1, max_length=MAX_TEXTS, fail_fast=True), Tag("<lists>")],
        Discriminator(tag_prompt),
    ]
    dimensions: PositiveCount | None = Field(
        None, description="Numbers of a vector: its first ones, for models that are trained for that"
    )
    encoding_format: Literal["float", "base64"] = Field("float", description="base64: of little-endian float32")

    @property
    def texts(self) -> Sequence[Prompt]:
        """The inputs to embed as a list, also where one is given alone."""
        return list_prompts(self.input)


class EmbeddingObject(BaseModel):
    """The vector of a text: numbers, or their bytes in base64."""

    object: str = "embedding"
    index: int
    embedding: list[float] | str


class EmbeddingResponse(BaseModel):
    """Response of POST /v1/embeddings."""

    object: str = "list"
    data: list[EmbeddingObject]
    model: str
    usage: PooledUsage


def create_router(service: OpenAIServing) -> APIRouter:
    """Create the route for a served model."""
    router = APIRouter(prefix="/v1", responses=ERROR_RESPONSES, route_class=BodyRoute)

    @router.post("/embeddings", response_model=None, responses={200: {"model": EmbeddingResponse}})
    async def embeddings(body: EmbeddingRequest, request: Request) -> Response:
        """Make a vector of each text."""
        plan = partial(plan_call, service, body, request.state.key)
        return await answer_pooled(service, body, request, len(body.texts), plan, partial(to_response, body))

    return router


def plan_call(service: OpenAIServing, body: EmbeddingRequest, key: ApiKey) -> PooledPlan[list[Tensor]]:
    """Plan the vectors of a request. Raises APIError or ValueError."""
    llm = service.llm
    lora = service.find_lora(body.model)
    shared = GenerateRequest("", salt=compose_salt(key, body.cache_salt), owner=key.name, lora=lora)
    plan = plan_vectors(llm.input_processor, llm.pooling, body.texts, shared, body.dimensions)
    if body.dimensions and body.dimensions > llm.spec.hidden_size:
        raise APIError(400, f"dimensions: vectors of this model have {llm.spec.hidden_size} numbers", "dimensions")
    return plan


def to_response(body: EmbeddingRequest, vectors: list[Tensor], usage: PooledUsage) -> Json:
    """Return the response for the vectors of all texts."""
    encode = _to_base64 if body.encoding_format == "base64" else _to_numbers
    data = [{"object": "embedding", "index": i, "embedding": encode(v.numpy())} for i, v in enumerate(vectors)]
    return {"object": "list", "data": data, "model": body.model, "usage": usage.model_dump()}


def _to_base64(vector: NDArray[np.float32]) -> str:
    return b64encode(vector.astype("<f4").tobytes()).decode()


def _to_numbers(vector: NDArray[np.float32]) -> list[float]:
    return vector.astype(np.float64).tolist()
