"""OpenAI's embeddings: a vector of each text, as the model's files say that it pools."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Sequence
from functools import partial
from typing import Annotated, Literal

import numpy as np
from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import BaseModel, Field

from retain.processing.input import GenerateRequest, Prompt
from retain.processing.pooling import VectorReader, prepare_pooled
from retain.server.auth import ApiKey
from retain.server.openai.body import BodyRoute
from retain.server.openai.errors import ERROR_RESPONSES, APIError
from retain.server.openai.pooled_calls import MAX_TEXTS, PooledCall, PooledFields, PooledUsage, answer_pooled
from retain.server.openai.protocol import Json, NonEmptyStr, TokenIds
from retain.server.openai.serving import OpenAIServing, compose_salt


class EmbeddingRequest(PooledFields):
    """POST /v1/embeddings."""

    input: (
        NonEmptyStr
        | Annotated[list[NonEmptyStr], Field(min_length=1, max_length=MAX_TEXTS, fail_fast=True)]
        | TokenIds
        | Annotated[list[TokenIds], Field(min_length=1, max_length=MAX_TEXTS, fail_fast=True)]
    )
    dimensions: Annotated[int, Field(ge=1, lt=2**31)] | None = Field(
        None, description="Numbers of a vector: its first ones, for models that are trained for that"
    )
    encoding_format: Literal["float", "base64"] = Field("float", description="base64: of little-endian float32")

    @property
    def texts(self) -> Sequence[Prompt]:
        """The texts as a list: `input` may be one or several."""
        x = self.input
        return [x] if isinstance(x, str) or isinstance(x[0], int) else x


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
        key = request.state.key
        count = len(body.texts)
        return await answer_pooled(service, body, request, count, lambda: prepare(service, body, key))

    return router


def prepare(service: OpenAIServing, body: EmbeddingRequest, key: ApiKey) -> PooledCall:
    """Prepare the texts of a request. Raises APIError or ValueError."""
    llm = service.llm
    if llm.pooling is None:
        raise APIError(400, "this model generates and makes no embeddings: see --pooling", "model")
    if body.dimensions and body.dimensions > llm.spec.hidden_size:
        raise APIError(400, f"dimensions: vectors of this model have {llm.spec.hidden_size} numbers", "dimensions")
    salt = compose_salt(key, body.cache_salt)
    readers = [VectorReader(llm.pooling) for _ in body.texts]
    texts = [
        partial(prepare_pooled, llm.input_processor, GenerateRequest(text, salt=salt, owner=key.name), reader)
        for text, reader in zip(body.texts, readers, strict=True)
    ]

    def answer(usage: PooledUsage) -> Json:
        vectors = (reader.vector(body.dimensions).numpy() for reader in readers)
        data = [
            {
                "object": "embedding",
                "index": i,
                "embedding": b64encode(v.astype("<f4").tobytes()).decode()
                if body.encoding_format == "base64"
                else v.astype(np.float64).tolist(),
            }
            for i, v in enumerate(vectors)
        ]
        return {"object": "list", "data": data, "model": body.model, "usage": usage.model_dump()}

    return PooledCall([texts], answer)
