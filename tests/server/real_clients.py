"""A server that answers real clients at once: a tiny model with a real tokenizer writes what a recipe dictates.

    with open_dictated_server(answer) as (server, log):
        ...  # point a client at server.url
    for generation in log.generations: ...

The model has the vocabulary and the special tokens of SmolLM2 and a context of 262,144 tokens. A recipe is a function
of the conversation, because clients ask more than a test expects: for titles, for summaries, with a probe.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from torch import Tensor

from retain.engine.request import Request
from retain.processing.input import GenerateRequest
from retain.processing.output import RequestOutputState
from retain.server.launch import GracefulServer
from retain.server.openai.chat_protocol import ChatCompletionRequest
from tests.helpers.folders import save_model_folder
from tests.helpers.recorded_sessions import RecordedRequest, RecordedSession
from tests.helpers.tiny_models import tiny_checkpoint
from tests.helpers.tokenizers import open_tokenizer
from tests.server.conftest import HTTP, run_server, wait_until

Json = dict[str, Any]
Recipe = Callable[[ChatCompletionRequest], str]
CONTEXT = 262_144
# ChatML. It renders what an assistant said exactly as the model wrote it.
TEMPLATE = """{%- if tools %}<|im_start|>system
{% for t in tools %}{{ t | tojson }}
{% endfor %}Write <tool_call>{"name": ..., "arguments": ...}</tool_call>.<|im_end|>
{% endif %}
{%- for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


@dataclass
class Exchange:
    """A request as a client sent it, and the status of its response."""

    method: str
    path: str
    body: Json
    headers: dict[str, str]
    status: int = 0
    response: bytes = b""


@dataclass
class Generation:
    """An answer of the model: to which conversation, and how much of the prompt was cached."""

    body: ChatCompletionRequest
    answer: str
    state: RequestOutputState

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return len(self.state.request.prompt)

    @property
    def cached_tokens(self) -> int:
        """Tokens of the prompt that were cached."""
        return self.state.request.stats.num_cached_tokens


@dataclass
class Log:
    """What a server was asked."""

    exchanges: list[Exchange] = field(default_factory=list)
    generations: list[Generation] = field(default_factory=list)
    requests: list[Request] = field(default_factory=list)  # of the engine, also those of plain texts


@dataclass(frozen=True)
class DictatedRequest(GenerateRequest):
    """A request whose answer is dictated."""

    answer: str = ""
    body: ChatCompletionRequest | None = None


class DictatedTokens:
    """A grammar that allows these tokens only (see retain.engine.grammar)."""

    error = "another token was sampled than the one that is dictated"

    def __init__(self, tokens: Sequence[int]):
        self._tokens = tokens
        self._position = 0

    def mask_logits(self, logits: Tensor, drafts: Sequence[int]) -> None:
        for i, row in enumerate(logits):
            if self._position + i < len(self._tokens):
                row.fill_(-torch.inf)
                row[self._tokens[self._position + i]] = 0

    def accept_token(self, token: int) -> bool:
        is_next = self._position < len(self._tokens) and token == self._tokens[self._position]
        self._position += is_next
        return is_next

    @property
    def is_complete(self) -> bool:
        return self._position == len(self._tokens)


def save_model(folder: Path, **changes: Any) -> Path:
    """Write a model of one layer with SmolLM2's tokenizer and the context of a large model."""
    tokenizer = open_tokenizer("smollm2")
    tokenizer._core.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer.special_tokens_map))
    shape = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "hidden_size": 32}
    checkpoint = tiny_checkpoint(
        "llama",
        vocab_size=tokenizer.vocab_size,
        max_position_embeddings=CONTEXT,
        eos_token_id=sorted(tokenizer.stop_token_ids),
        **{**shape, **changes},
    )
    return save_model_folder(folder, checkpoint)


@contextmanager
def open_dictated_server(recipe: Recipe, **options: Any) -> Iterator[tuple[GracefulServer, Log]]:
    """Serve the model under the name `local`, with the answers of a recipe."""
    engine_options = {"kv_memory": "512MiB", "dtype": "float32", "max_running_requests": 4}
    engine_options |= options.pop("engine_options", {})
    options = {"served_model_name": ("local",), "any_model_name": True, **options}
    with (
        TemporaryDirectory() as folder,
        run_server(str(save_model(Path(folder))), engine_options, TEMPLATE, **options) as server,
        dictated(server, recipe) as log,
    ):
        yield server, log


def replay(session: RecordedSession, **options: Any) -> list[tuple[RecordedRequest, Generation]]:
    """Send the requests of a recorded session, and return each with its answer."""
    answers = iter(session.requests)
    with open_dictated_server(lambda body: next(answers).answer, **options) as (server, log):
        for request in session.requests:
            url = server.url.removesuffix("/v1") + request.path
            answer = HTTP.post(url, json=request.body, timeout=120)
            assert answer.status_code == 200, answer.text
            wait_until(lambda: not server.service.admission.num_in_flight)
    return list(zip(session.requests, log.generations, strict=True))


def cached_shares(replayed: Sequence[tuple[RecordedRequest, Generation]]) -> dict[str, float]:
    """Return the cached share of the prompts of each kind of requests, without the first turn."""
    found: dict[str, list[Generation]] = {}
    for request, generation in replayed:
        found.setdefault(request.kind, []).append(generation)
    found["turn"] = found["turn"][1:]
    return {
        kind: sum(one.cached_tokens for one in answers) / sum(one.prompt_tokens for one in answers)
        for kind, answers in found.items()
    }


@contextmanager
def dictated(server: GracefulServer, recipe: Recipe) -> Iterator[Log]:
    """Let the model write the answers of a recipe, and write down what clients send."""
    service, log = server.service, Log()
    prepare, process = service.prepare_chat_request, service.process

    def prepare_dictated(body: ChatCompletionRequest, *arguments: Any) -> Any:
        prepared = prepare(body, *arguments)
        fields = {name: getattr(prepared.request, name) for name in GenerateRequest.__dataclass_fields__}
        return prepared._replace(request=DictatedRequest(**fields, answer=recipe(body), body=body))

    def process_dictated(requests: Sequence[GenerateRequest]) -> list[RequestOutputState]:
        states = process(requests)
        log.requests += [state.request for state in states]
        for request in requests:
            if isinstance(request, DictatedRequest):
                for state in states:
                    ids = service.llm.tokenizer.encode(request.answer, add_special_tokens=False)
                    state.request.grammar = DictatedTokens(ids)
                    log.generations.append(Generation(request.body, request.answer, state))
        return states

    wrapper: Any = server.config.app
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(service, "prepare_chat_request", prepare_dictated)
        patch.setattr(service, "process", process_dictated)
        patch.setattr(wrapper, "app", Recorder(wrapper.app, log))
        yield log


class Recorder:
    """Middleware that writes down requests and responses."""

    def __init__(self, app: Any, log: Log):
        self.app, self.log = app, log

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        body = bytearray()
        headers = {k.decode("latin-1"): v.decode("latin-1") for k, v in scope["headers"]}
        exchange = Exchange(scope["method"], scope["path"], {}, headers)
        self.log.exchanges.append(exchange)

        async def receive_recorded() -> Any:
            message = await receive()
            body.extend(message.get("body", b""))
            if body and message["type"] == "http.request" and not message.get("more_body"):
                exchange.body = json.loads(body)
            return message

        async def send_recorded(message: Any) -> None:
            exchange.status = message.get("status", exchange.status)
            exchange.response += message.get("body", b"")
            await send(message)

        await self.app(scope, receive_recorded, send_recorded)
