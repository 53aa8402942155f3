"""Tokenization over HTTP: /tokenize, /detokenize and /tokenizer_info, as vLLM's server has them."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import BaseModel, Field

from retain.server.openai.body import BodyRoute
from retain.server.openai.chat_protocol import MessageParam, PromptEndFields
from retain.server.openai.errors import ERROR_RESPONSES
from retain.server.openai.messages import to_template_messages
from retain.server.openai.protocol import TokenId
from retain.server.openai.serving import OpenAIServing
from retain.server.request_model import StrictModel


class TokenizeCompletionRequest(StrictModel, other_fields="tokenize"):
    """POST /tokenize with a prompt."""

    model: str | None = None
    prompt: str
    add_special_tokens: bool = True


class TokenizeChatRequest(PromptEndFields, other_fields="tokenize_chat"):
    """POST /tokenize with messages."""

    model: str | None = None
    messages: Annotated[list[MessageParam], Field(min_length=1)]


class TokenizeResponse(BaseModel):
    """Response of POST /tokenize."""

    tokens: list[int]
    count: int
    max_model_len: int


class DetokenizeRequest(StrictModel):
    """POST /detokenize."""

    model: str | None = None
    tokens: Annotated[list[TokenId], Field(fail_fast=True)]


class DetokenizeResponse(BaseModel):
    """Response of POST /detokenize."""

    prompt: str


class TokenizerInfo(BaseModel):
    """Response of GET /tokenizer_info."""

    bos_token: str | None
    eos_token: str | None
    pad_token: str | None
    chat_template: str | None


def create_router(service: OpenAIServing) -> APIRouter:
    """Create the routes for a served model's tokenizer."""
    router = APIRouter(responses=ERROR_RESPONSES, route_class=BodyRoute)
    tokenizer = service.llm.tokenizer

    @router.post("/tokenize", response_model=None, responses={200: {"model": TokenizeResponse}})
    async def tokenize(body: TokenizeCompletionRequest | TokenizeChatRequest, request: Request) -> Response:
        """Tokenize a text or a conversation."""
        service.check_model(body.model)

        def encode_body() -> Response:
            if isinstance(body, TokenizeCompletionRequest):
                text = body.prompt
                add_special_tokens = body.add_special_tokens
            else:
                messages = to_template_messages(body.messages)
                add_special_tokens = False
                text = tokenizer.apply_chat_template(
                    messages, body.add_generation_prompt, continue_final_message=body.continue_final_message
                )
            service.llm.input_processor.check_length(text)
            tokens = tokenizer.encode(text, add_special_tokens)
            max_model_len = service.llm.max_model_len
            return _to_response(TokenizeResponse(tokens=tokens, count=len(tokens), max_model_len=max_model_len))

        prompt_field = "prompt" if isinstance(body, TokenizeCompletionRequest) else "messages"
        return await service.run_admitted(request.state.admission, encode_body, prompt_field)

    @router.post("/detokenize", response_model=None, responses={200: {"model": DetokenizeResponse}})
    async def detokenize(body: DetokenizeRequest, request: Request) -> Response:
        """Return the text of token ids."""
        service.check_model(body.model)
        return await service.run_admitted(
            request.state.admission, lambda: _to_response(DetokenizeResponse(prompt=tokenizer.decode(body.tokens)))
        )

    @router.get("/tokenizer_info")
    async def tokenizer_info() -> TokenizerInfo:
        """Get the special tokens and the chat template of the tokenizer (for lm-eval)."""
        special = tokenizer.special_tokens_map
        template = tokenizer.chat_template
        bos, eos, pad = (special.get(f"{name}_token") for name in ("bos", "eos", "pad"))
        return TokenizerInfo(bos_token=bos, eos_token=eos, pad_token=pad, chat_template=template)

    return router


def _to_response(content: BaseModel) -> Response:
    """Return an object as a response. Called in a thread: its length is that of the client's text."""
    return Response(content.model_dump_json(), media_type="application/json")
