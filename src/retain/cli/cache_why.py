"""`retain cache why`: what a cache would have of recorded requests, and why not more. Loads no weights."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from retain.kv.checkpoints import Demand
from retain.kv.eviction import policies
from retain.kv.eviction.auto_policy import AutoPolicy, check_spec
from retain.kv.prefix.diagnosis import explain_from_history
from retain.kv.prefix.history import PrefixHistory, SeenText
from retain.kv.prefix.start import MissReason, PrefixDiagnosis, Start
from retain.kv.text import Text
from retain.models.resolve import resolve_model
from retain.processing.prefix_report import PrefixReport, build_report
from retain.processing.tokenizer import Tokenizer
from retain.server.field_paths import find_field
from retain.server.openai.chat_protocol import ChatCompletionRequest
from retain.server.openai.errors import describe_first
from retain.server.openai.messages import render_prompt, to_template_tools
from retain.server.openai.protocol import CompletionRequest, SamplingFields
from retain.server.tool_formats import detect_tool_format

SHOWS_PARTING = {MissReason.DIVERGED, MissReason.NEW_TEXT}


def explain_files(args: Namespace) -> int:
    """Print for each prompt of the files, in order, what an infinite cache would have of it after those before it."""
    check_spec(args.kv_policy)
    tokenizer = Tokenizer.open(resolve_model(args.model))
    simulation = CacheSimulation(args.kv_policy)
    num_tokens = num_cached = num_prompts = 0
    for file in args.files:
        for prompt in read_prompts(Path(file), tokenizer):
            diagnosis, nearest = simulation.explain(prompt)
            report = build_report(diagnosis, tokenizer)
            num_prompts = num_prompts + 1
            num_tokens = num_tokens + len(prompt.token_ids)
            num_cached += diagnosis.num_cached_tokens
            if args.json:
                print(json.dumps({"request": prompt.source, "nearest": nearest, **report.to_json()}))
            else:
                print("\n".join(format_report(prompt.source, nearest, report)))
    if not args.json:
        print(f"{num_prompts} prompts: {num_cached} of {num_tokens} tokens would be cached")
    return 0


class CacheSimulation:
    """A cache that keeps every prompt and evicts nothing."""

    def __init__(self, default_policy: str):
        self.default_policy = default_policy
        self.history = PrefixHistory(max_texts=sys.maxsize, max_tokens=sys.maxsize)
        self.sources: dict[int, str] = {}  # by the identity of a text's tokens

    def explain(self, prompt: RecordedPrompt) -> tuple[PrefixDiagnosis, str | None]:
        """Diagnose a prompt, then keep it. Returns the source of the nearest text, too. Raises ValueError."""
        ids = prompt.token_ids
        if not ids:
            raise ValueError(f"{prompt.source}: the prompt is empty")
        try:
            # Whatever `auto` stands for has a budget, and that is all that matters here.
            policy = policies.parse(AutoPolicy().choose(prompt.kv_policy or self.default_policy)).resolve(len(ids))
        except ValueError as error:
            raise ValueError(f"{prompt.source}: {error}") from None
        link = f"{policy.ring_window} {prompt.salt}".encode(errors="surrogatepass")
        asked = Start(Text(ids, prompt.salt), Demand(policy, max_length=len(ids) - 1))
        diagnosis = explain_from_history(self.history, asked, link)
        nearest = self.sources.get(id(diagnosis.nearest))
        text = SeenText(link, prompt.salt, policy, diagnosis.prompt, 0 if policy.has_budget else len(ids))
        self.history.add(text)
        self.sources[id(text.tokens)] = prompt.source
        return diagnosis, nearest


def format_report(source: str, nearest: str | None, report: PrefixReport) -> Sequence[str]:
    """Return the lines about one prompt."""
    d = report.diagnosis
    lines = [f"{source}: {d.num_cached_tokens} of {len(d.prompt)} tokens cached; {report.cause}: {report.explanation}"]
    if d.reason in SHOWS_PARTING:
        lines.append(f"    after token {d.common_length}: {report.before!r}")
        lines.append(f"    it goes on with       {report.prompt_text!r}")
    if d.reason is MissReason.DIVERGED:
        lines.append(f"    {nearest} with {report.nearest_text!r}")
    return lines


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
        tool_format = detect_tool_format(tokenizer.chat_templates.find(has_tools=True) or "")
        text = render_prompt(chat, to_template_tools(chat), tokenizer, tool_format)
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
