"""Scores of documents for a query: /v1/rerank as Jina and Cohere have it, /v1/score as vLLM's server."""

from __future__ import annotations

from functools import partial
from time import time
from typing import Annotated, ClassVar
from uuid import uuid4

from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import BaseModel, Field, model_validator

from retain.processing.input import GenerateRequest
from retain.processing.pooling import PooledPlan
from retain.processing.reranking import INSTRUCTION, plan_scores
from retain.server.auth import ApiKey
from retain.server.openai.body import BodyRoute
from retain.server.openai.errors import ERROR_RESPONSES
from retain.server.openai.pooled_calls import MAX_TEXTS, PooledFields, PooledUsage, answer_pooled
from retain.server.openai.protocol import Count, Json, NonEmptyStr
from retain.server.openai.serving import OpenAIServing, compose_salt
from retain.server.request_model import StrictModel

Texts = Annotated[list[NonEmptyStr], Field(min_length=1, max_length=MAX_TEXTS, fail_fast=True)]


class TextDocument(StrictModel):
    """A document to rerank, given as an object with a text."""

    text: NonEmptyStr


class ScoringFields(PooledFields):
    """Fields common to both requests."""

    operation: ClassVar[str] = "rerank"

    instruction: Annotated[str, Field(max_length=4096)] = Field(
        INSTRUCTION, description="What a document has to do for a query, in words"
    )


class RerankRequest(ScoringFields):
    """POST /v1/rerank."""

    prompt_field = "documents"

    query: NonEmptyStr
    documents: Annotated[list[NonEmptyStr | TextDocument], Field(min_length=1, max_length=MAX_TEXTS, fail_fast=True)]
    top_n: Count | None = Field(None, description="Best documents to return; 0: all")
    return_documents: bool = True

    @property
    def texts(self) -> list[str]:
        """The texts of the documents, however they are given."""
        return [d if isinstance(d, str) else d.text for d in self.documents]


class ScoreRequest(ScoringFields):
    """POST /v1/score."""

    prompt_field = "text_2"

    text_1: NonEmptyStr | Texts = Field(description="A query for all of text_2, or one for each")
    text_2: NonEmptyStr | Texts

    @model_validator(mode="after")
    def _check_lengths(self) -> ScoreRequest:
        if isinstance(self.text_1, list) and len(self.text_1) not in (1, len(self._documents)):
            raise ValueError("text_1 has one text, or as many as text_2")
        return self

    @property
    def _documents(self) -> list[str]:
        return [self.text_2] if isinstance(self.text_2, str) else self.text_2

    @property
    def pairs(self) -> list[tuple[str, str]]:
        """A query and a document each."""
        queries = [self.text_1] if isinstance(self.text_1, str) else self.text_1
        queries = queries * len(self._documents) if len(queries) == 1 else queries
        return list(zip(queries, self._documents, strict=True))


class RerankResult(BaseModel):
    """A document and its score. `document` is absent without `return_documents`."""

    index: int
    document: dict[str, str] | None = None
    relevance_score: float


class RerankResponse(BaseModel):
    """Response of POST /v1/rerank: the best document first."""

    id: str
    model: str
    usage: PooledUsage
    results: list[RerankResult]


class ScoreObject(BaseModel):
    """The score of one pair of texts."""

    index: int
    object: str = "score"
    score: float


class ScoreResponse(BaseModel):
    """Response of POST /v1/score."""

    id: str
    object: str = "list"
    created: int
    model: str
    data: list[ScoreObject]
    usage: PooledUsage


def create_router(service: OpenAIServing) -> APIRouter:
    """Create the routes for a served model."""
    router = APIRouter(prefix="/v1", responses=ERROR_RESPONSES, route_class=BodyRoute)

    @router.post("/rerank", response_model=None, responses={200: {"model": RerankResponse}})
    async def rerank(body: RerankRequest, request: Request) -> Response:
        """Sort documents by how well they fit a query."""
        pairs = [(body.query, text) for text in body.texts]
        plan = partial(plan_call, service, body, request.state.key, pairs)
        return await answer_pooled(service, body, request, len(pairs), plan, partial(to_rerank_response, body))

    @router.post("/score", response_model=None, responses={200: {"model": ScoreResponse}})
    async def score(body: ScoreRequest, request: Request) -> Response:
        """Score pairs of a query and a document."""
        pairs = body.pairs
        plan = partial(plan_call, service, body, request.state.key, pairs)
        return await answer_pooled(service, body, request, len(pairs), plan, partial(to_score_response, body))

    return router


def plan_call(
    service: OpenAIServing, body: ScoringFields, key: ApiKey, pairs: list[tuple[str, str]]
) -> PooledPlan[list[float]]:
    """Plan the scores of a request. Raises ValueError."""
    lora = service.find_lora(body.model)
    shared = GenerateRequest("", salt=compose_salt(key, body.cache_salt), owner=key.name, lora=lora)
    return plan_scores(service.llm.input_processor, service.llm.pooling, pairs, shared, body.instruction)


def to_rerank_response(body: RerankRequest, scores: list[float], usage: PooledUsage) -> Json:
    """Return the response for the scores of all documents."""
    texts = body.texts
    order = sorted(range(len(texts)), key=lambda i: -scores[i])[: body.top_n or None]
    results = [
        {"index": i}
        | ({"document": {"text": texts[i]}} if body.return_documents else {})
        | {"relevance_score": scores[i]}
        for i in order
    ]
    return {"id": f"rerank-{uuid4().hex}", "model": body.model, "usage": usage.model_dump(), "results": results}


def to_score_response(body: ScoreRequest, scores: list[float], usage: PooledUsage) -> Json:
    """Return the response for the scores of all pairs."""
    return {
        "id": f"score-{uuid4().hex}",
        "object": "list",
        "created": int(time()),
        "model": body.model,
        "data": [{"index": i, "object": "score", "score": score} for i, score in enumerate(scores)],
        "usage": usage.model_dump(),
    }
