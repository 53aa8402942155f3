"""What is sent back, described: for the OpenAPI page, and for whoever checks us against it. shapes.py makes it."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

Json = dict[str, Any]


class Usage(BaseModel):
    """Tokens."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: dict[str, int]


class TopLogprob(BaseModel):
    """A token, nats, and its bytes."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    """And the likeliest ones."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    """Of an answer's tokens."""

    content: list[TokenLogprob]
    refusal: None


class FunctionCall(BaseModel):
    """Arguments are JSON, as text."""

    name: str
    arguments: str


class ToolCall(BaseModel):
    """A call of a tool."""

    id: str
    type: str
    function: FunctionCall


class ChatCompletionMessage(BaseModel):
    """What the model says."""

    role: str
    content: str | None
    refusal: None
    tool_calls: list[ToolCall] | None = None


class ChatCompletionResponseChoice(BaseModel):
    """One answer."""

    index: int
    message: ChatCompletionMessage
    logprobs: ChatLogprobs | None
    finish_reason: str


class ChatCompletionResponse(BaseModel):
    """An answer of /v1/chat/completions. `retain`: what the cache and the drafts cost, answer by answer."""

    id: str
    object: str
    created: int
    model: str
    choices: list[ChatCompletionResponseChoice]
    usage: Usage
    retain: list[Json]


class CompletionLogprobs(BaseModel):
    """Of a text's tokens; nothing is known of the first token of a prompt."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionResponseChoice(BaseModel):
    """One answer."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str


class CompletionResponse(BaseModel):
    """An answer of /v1/completions. `retain`: as in Chat."""

    id: str
    object: str
    created: int
    model: str
    choices: list[CompletionResponseChoice]
    usage: Usage
    retain: list[Json]


class ModelCard(BaseModel):
    """What is served. `retain`: its context, policy, drafters that requests may ask for."""

    id: str
    object: str
    created: int
    owned_by: str
    max_model_len: int
    retain: Json


class ModelList(BaseModel):
    """What there is."""

    object: str
    data: list[ModelCard]


class TokenizeResponse(BaseModel):
    """Of /tokenize."""

    tokens: list[int]
    count: int
    max_model_len: int


class DetokenizeResponse(BaseModel):
    """Of /detokenize."""

    prompt: str


class TokenizerInfo(BaseModel):
    """Of /tokenizer_info."""

    bos_token: str | None
    eos_token: str | None
    pad_token: str | None
    chat_template: str | None
