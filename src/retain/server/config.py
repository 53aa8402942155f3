"""Configuration of `retain serve`: where to listen, what to offer, and the limits of requests.

Imports neither the web framework nor the engine, so that the command line can generate its arguments from here.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from retain.options import (
    MAX_SIZE,
    Bounds,
    ByteCount,
    NonNegativeFloat,
    NonNegativeInt,
    Port,
    PositiveFloat,
    PositiveInt,
    Size,
    check_bounds,
    option,
)
from retain.server.auth import ApiKeys

DRAFTERS = ("ngram", "self", "suffix")  # every server offers these


@dataclass(frozen=True)
class Limits:
    """Limits of requests. None disables a limit. Limits count choices: a request with n=4 counts as 4.

    Raises ValueError for a number out of its bounds.
    """

    max_queued_requests: NonNegativeInt = option(256, "waiting requests at most, besides running ones")
    max_requests_per_key: PositiveInt | None = option(None, "concurrent requests of one API key at most")
    max_output_tokens: PositiveInt | None = option(None, "output tokens of a request at most")
    max_choices: PositiveInt = option(16, "choices of one request at most: prompts times n")
    max_body_size: Size = option(8 * 2**20, "size of a request body at most")
    max_in_flight_bytes: Size = option(
        256 * 2**20, "bytes of the bodies of requests in flight at most; an idle server takes any legal body"
    )
    upload_timeout: PositiveFloat = option(30.0, "seconds to receive a request body")
    max_header_size: Size = option(64 * 2**10, "size of a request's line and headers at most")
    header_timeout: PositiveFloat = option(
        10.0, "seconds to receive the headers of a request, and the rest of a refused body"
    )
    send_timeout: PositiveFloat = option(
        60.0, "seconds in which a client must read some of an answer that waits for it"
    )
    max_connections: PositiveInt = option(512, "open connections at most; others are closed at once")
    request_timeout: PositiveFloat = option(600.0, "seconds from the arrival of a request to the end of its response")
    sandbox_timeout: PositiveFloat = option(
        5.0, "seconds of a processor to compile a grammar or to render a chat template"
    )
    max_stored_bytes: Annotated[ByteCount, Bounds(0, MAX_SIZE)] = option(
        64 * 2**20, "bytes of stored responses at most; 0 stores none"
    )
    max_pin_seconds: NonNegativeFloat = option(3600.0, "longest time a prompt may be pinned, in seconds")

    def __post_init__(self) -> None:
        check_bounds(self)


@dataclass(frozen=True)
class ServerConfig:
    """Address, model name, API keys and features of a server. Raises ValueError for a number out of its bounds."""

    host: str = option("127.0.0.1", "address to bind")
    port: Port = option(8000, "port to bind; 0 picks a free one")
    served_model_name: tuple[str, ...] = option(
        ("model",), "model names that clients may use, the first of them in logs", nargs="+"
    )
    any_model_name: bool = option(False, "answer requests whatever model they name: it is always the same one")
    normalize_prompts: bool = option(
        False,
        "leave out the header line of Claude Code, sort tools, show an end of the system prompt that changes behind "
        "the history, so that prompts that say the same begin with the same tokens; a header of the response says so",
    )
    keep_reasoning: bool = option(
        False,
        "keep what was thought in answers cached, for clients that send it back where the chat template shows it "
        "otherwise; without it the template says what of an answer the next turn begins with",
    )
    api_keys: ApiKeys = field(default_factory=lambda: ApiKeys({}))
    insecure_no_api_key: bool = option(False, "listen beyond this machine even without API keys, for everybody")
    allowed_hosts: tuple[str, ...] = option(
        (), "Host name that requests may use on a server without API keys, besides local ones (may be repeated)"
    )
    limits: Limits = field(default_factory=Limits)
    allowed_origins: tuple[str, ...] = option((), "allowed CORS origin (may be repeated)")
    allowed_drafters: tuple[str, ...] = option((), "drafter that requests may select (may be repeated)")
    allow_lora_updates: bool = option(
        False, "let operators load and unload adapters: POST /v1/load_lora_adapter (see --max-loras)"
    )
    enable_inspector: bool = option(False, "serve the cache inspector at /inspect")
    otlp_traces_endpoint: str = option(
        "", "send a trace of each request there, by OTLP over HTTP: http://localhost:4318/v1/traces"
    )
    trace_content: bool = option(False, "put prompts and answers into traces, too")
    kv_events: str = option(
        "",
        "publish what the prefix cache holds, for gateways: tcp://127.0.0.1:5557 (replays at the next "
        "port); elsewhere everybody who reaches the address can read all prompts: add ,insecure=yes",
    )
    stream_interval: PositiveInt = option(
        1,
        "tokens of a streamed chunk, at least, except for the first and the last: more tokens cost the processor less",
    )
    drain_timeout: NonNegativeInt = option(300, "seconds that running requests get after SIGTERM")

    def __post_init__(self) -> None:
        if isinstance(self.served_model_name, str):
            object.__setattr__(self, "served_model_name", (self.served_model_name,))
        if not self.served_model_name or not all(self.served_model_name):
            raise ValueError("--served-model-name: a name must not be empty")
        check_bounds(self)

    @classmethod
    def for_model(cls, model: str, **given: Any) -> ServerConfig:
        """Return the configuration of a server that is named after its model, unless told, and offers `DRAFTERS`."""
        names = tuple(given.pop("served_model_name", ())) or (Path(model).stem,)
        drafters = tuple(dict.fromkeys([*given.pop("allowed_drafters", ()), *DRAFTERS]))
        return cls(served_model_name=names, allowed_drafters=drafters, **given)
