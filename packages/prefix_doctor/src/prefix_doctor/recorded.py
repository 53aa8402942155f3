"""Recorded requests: files of bodies, and their prompts as the server encodes them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from prefix_doctor.simulation import RecordedPrompt
from retain.processing.tokenizer import Tokenizer
from retain.server.field_paths import find_field
from retain.server.openai.chat_protocol import ChatCompletionRequest
from retain.server.openai.errors import describe_first
from retain.server.openai.messages import fit_messages, render_prompt, to_template_messages, to_template_tools
from retain.server.openai.protocol import CompletionRequest, SamplingFields
from retain.server.tool_formats import detect_tool_format

T = TypeVar("T", bound=SamplingFields)


def iter_bodies(path: Path) -> Iterator[tuple[str, Any]]:
    """Yield the bodies of a file, each with its place: one, JSON lines or a list; or a text, as a string.

    Raises OSError, and ValueError with the file and line.
    """
    try:
        text = path.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text: byte {error.start} is not") from None
    if not text.strip():
        raise ValueError(f"{path} is empty: give a JSON body, JSON lines or a text")
    if text.lstrip().startswith(("{", "[{")):
        yield from _parse_bodies(path, text)
    else:
        yield str(path), text


def _parse_bodies(path: Path, text: str) -> Iterator[tuple[str, Any]]:
    """Yield every body with its place."""
    try:
        whole = json.loads(text)
    except RecursionError:
        raise ValueError(f"{path} is nested too deeply") from None
    except ValueError:
        lines = [(f"{path}:{i}", line) for i, line in enumerate(text.splitlines(), 1) if line.strip()]
        for source, line in lines:
            try:
                yield source, json.loads(line)
            except (ValueError, RecursionError) as error:
                raise ValueError(f"{source} is not JSON: {error}") from None
        return
    if isinstance(whole, list):
        yield from ((f"{path}[{i}]", body) for i, body in enumerate(whole))
    else:
        yield str(path), whole


def encode_body(source: str, body: Any, tokenizer: Tokenizer) -> Iterator[RecordedPrompt]:
    """Yield the prompts of a text or of a body, encoded as the server does it. Raises ValueError.

    The body may be that of OpenAI's batches (`{"body": {...}}`).
    """
    if isinstance(body, str):
        yield RecordedPrompt(source, tokenizer.encode(body))
        return
    if isinstance(body, dict) and isinstance(body.get("body"), dict):
        body = body["body"]
    if not isinstance(body, dict) or not ("messages" in body or "prompt" in body):
        raise ValueError("neither messages nor a prompt")
    if "messages" in body:
        chat = _validate(ChatCompletionRequest, body)
        tool_format = detect_tool_format(tokenizer.chat_templates.find(has_tools=True) or "")
        messages = fit_messages(to_template_messages(chat.messages), tokenizer, tool_format)
        text = render_prompt(chat, messages, to_template_tools(chat), tokenizer, tool_format)
        ids = tokenizer.encode(text, add_special_tokens=False)
        yield RecordedPrompt(source, ids, chat.kv_policy, chat.cache_salt or "")
        return
    completion = _validate(CompletionRequest, body)
    for prompt in completion.prompts:
        ids = tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
        if any(token >= tokenizer.vocab_size for token in ids):
            raise ValueError(f"prompt: a token id is outside the vocabulary of {tokenizer.vocab_size}")
        yield RecordedPrompt(source, ids, completion.kv_policy, completion.cache_salt or "")


def _validate(cls: type[T], body: dict[str, Any]) -> T:
    """Check the fields that are known; others do not change the prompt, and may be those of another server.

    Raises ValueError.
    """
    known = {field.alias or name for name, field in cls.model_fields.items()}
    try:
        return cls.model_validate({"model": "any", **{k: v for k, v in body.items() if k in known}})
    except ValidationError as error:
        first = error.errors()[0]
        location = find_field(cls.__pydantic_core_schema__, first["loc"])
        where, message = describe_first([{**first, "loc": location}])
        raise ValueError(f"{where}: {message}" if where else message) from None
