"""Recorded requests: files with bodies of the OpenAI API, or with plain text, as the prompts that a server computes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from retain.processing.tokenizer import Tokenizer
from retain.server.openai.chat_protocol import ChatCompletionRequest
from retain.server.openai.messages import render_prompt, to_template_tools
from retain.server.openai.protocol import CompletionRequest, SamplingFields

T = TypeVar("T", bound=SamplingFields)


@dataclass(frozen=True)
class RecordedPrompt:
    """A prompt of a recorded request. `source` names its file, and its line where the file has several."""

    source: str
    token_ids: list[int]
    kv_policy: str | None = None
    salt: str = ""


def read_prompts(path: Path, tokenizer: Tokenizer) -> Iterator[RecordedPrompt]:
    """Yield the prompts of a file: a JSON body, bodies as JSON lines or in a list, or a text.

    Bodies may be those of OpenAI's batches (`{"body": {...}}`). Raises ValueError with the file and line, and OSError.
    """
    try:
        text = path.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text: byte {error.start} is not") from None
    if not text.strip():
        raise ValueError(f"{path} is empty: give a JSON body, JSON lines or a text")
    if not text.lstrip().startswith(("{", "[{")):
        yield RecordedPrompt(str(path), tokenizer.encode(text))
        return
    for source, body in _parse_bodies(path, text):
        try:
            yield from _encode_body(source, body, tokenizer)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(x) for x in first["loc"])
            raise ValueError(f"{source}: {where}: {first['msg']}") from None
        except ValueError as error:
            raise ValueError(f"{source}: {error}") from None


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


def _encode_body(source: str, body: Any, tokenizer: Tokenizer) -> Iterator[RecordedPrompt]:
    """Yield the prompts of a body, encoded as the server does it. Raises ValueError."""
    if isinstance(body, dict) and isinstance(body.get("body"), dict):
        body = body["body"]
    if not isinstance(body, dict) or not ("messages" in body or "prompt" in body):
        raise ValueError("neither messages nor a prompt")
    if "messages" in body:
        chat = _validate(ChatCompletionRequest, body)
        text = render_prompt(chat, to_template_tools(chat), tokenizer)
        ids = tokenizer.encode(text, add_special_tokens=False)
        yield RecordedPrompt(source, ids, chat.kv_policy, chat.cache_salt or "")
        return
    completion = _validate(CompletionRequest, body)
    for prompt in completion.prompts:
        ids = tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        if any(token >= tokenizer.vocab_size for token in ids):
            raise ValueError(f"prompt: a token id is outside the vocabulary of {tokenizer.vocab_size}")
        yield RecordedPrompt(source, ids, completion.kv_policy, completion.cache_salt or "")


def _validate(cls: type[T], body: dict[str, Any]) -> T:
    """Check the fields that are known; others do not change the prompt, and may be those of another server."""
    known = {field.alias or name for name, field in cls.model_fields.items()}
    return cls.model_validate({"model": "any", **{k: v for k, v in body.items() if k in known}})
