"""Serving of generation requests: turns request bodies into engine requests and submits them as one group."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from time import time
from typing import NamedTuple, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from retain.engine.spec_decode.speculator import NO_SPECULATION
from retain.llm import LLM
from retain.processing.infill import encode_infill
from retain.processing.input import GenerateRequest, Prompt
from retain.processing.output import RequestOutputState
from retain.server.admission import AdmissionControl, RequestAdmission
from retain.server.auth import ApiKey
from retain.server.config import ServerConfig
from retain.server.engine_thread import EngineThread
from retain.server.grammar_trials import GrammarTrials
from retain.server.openai.body import BodyParser
from retain.server.openai.chat_dialect import ChatDialect
from retain.server.openai.chat_output import ChatOutputParser
from retain.server.openai.chat_protocol import ChatCompletionRequest
from retain.server.openai.chat_renderer import ChatRenderer, RenderedChat
from retain.server.openai.chat_turns import ChatTurn, count_before
from retain.server.openai.choice_builders import (
    ChatChoiceBuilder,
    CompletionChoiceBuilder,
    EchoedPrompt,
    echo_text,
    echo_tokens,
)
from retain.server.openai.completions_encoder import ChatCompletionEncoder, CompletionEncoder
from retain.server.openai.errors import APIError, invalid_request
from retain.server.openai.kv_hints import read_hints
from retain.server.openai.messages import build_grammar
from retain.server.openai.protocol import CompletionRequest, GenerationFields, SamplingFields
from retain.server.openai.streaming import GenerationResponse, ResponseEncoder
from retain.server.preparation import PreparationPool
from retain.server.request_group import CallInfo, EngineError, Pin, RequestGroup
from retain.server.sandbox import Sandbox
from retain.server.warning_header import add_warnings

log = logging.getLogger(__name__)
DEFAULT_MAX_TOKENS = 16  # of a completion, as in OpenAI's API
AS_MANY_AS_FIT = -1  # of max_tokens, as in llama.cpp's server
T = TypeVar("T")


class Prepared(NamedTuple):
    """Requests that are ready for the engine, the encoder of their answers, and what is pinned of the first prompt.

    `turn`: that of a conversation.
    """

    requests: list[GenerateRequest]
    encoder: ResponseEncoder
    pins: Sequence[Pin] = ()
    turn: ChatTurn | None = None


class PreparedChat(NamedTuple):
    """The request of a conversation, a parser of each of its answers, how it was rendered, and what follows."""

    request: GenerateRequest
    parsers: list[ChatOutputParser]
    chat: RenderedChat
    turn: ChatTurn


class OpenAIServing:
    """Serves one model, under one or several names."""

    def __init__(self, llm: LLM, engine_thread: EngineThread, server_config: ServerConfig, sandbox: Sandbox):
        """The model's chat template is rendered in the sandbox from now on."""
        self.llm = llm
        self.engine_thread = engine_thread
        self.limits = server_config.limits
        self.served_names = server_config.served_model_name
        for name in llm.input_processor.adapters.named:
            self.check_lora_name(name)
        self.any_model_name = server_config.any_model_name
        self.allows_lora_updates = server_config.allow_lora_updates
        self.drafters = list(server_config.allowed_drafters)  # those that requests may select
        self.stream_interval = server_config.stream_interval
        self.keeps_reasoning = server_config.keep_reasoning
        num_keys = len(server_config.api_keys)
        self.admission = AdmissionControl(self.limits, llm.config.max_running_requests, num_keys)
        self.body_parser = BodyParser()
        self.preparation = PreparationPool("prepare")
        self.grammar_trials = GrammarTrials(sandbox, num_keys)
        self.created = int(time())
        llm.tokenizer.chat_templates.renderer = sandbox
        dialect = ChatDialect.read(llm.tokenizer)
        self.chat_renderer = ChatRenderer(llm.input_processor, dialect, server_config.normalize_prompts)

    @property
    def dialect(self) -> ChatDialect:
        """How the model writes answers."""
        return self.chat_renderer.dialect

    @property
    def model_name(self) -> str:
        """The model's first name, for logs."""
        return self.served_names[0]

    @property
    def model_names(self) -> list[str]:
        """The names that requests may give: those of the model, and its adapters'."""
        return [*self.served_names, *list(self.llm.input_processor.adapters.named)]

    def check_lora_name(self, name: str) -> None:
        """Raise ValueError for the name of an adapter that is the model's."""
        if name in self.served_names:
            raise ValueError(f"an adapter cannot have the name of the model, {name!r}")

    # ---- requests ------------------------------------------------------------------------------------------------

    def check_model(self, model: str | None) -> None:
        """Raise APIError unless this names the served model. Nothing is ever loaded because a request names it."""
        if not self.any_model_name and model not in (None, *self.model_names):
            raise APIError(404, "model not found: see /v1/models", "model", "model_not_found")

    def find_lora(self, model: str | None) -> str | None:
        """Return the name of the adapter that a request names; None for the model itself.

        A name that has gone meanwhile stays one of an adapter: the engine refuses it.
        """
        is_model = model is None or model in self.served_names
        is_adapter = not is_model and (not self.any_model_name or model in self.llm.input_processor.adapters.named)
        return model if is_adapter else None

    def prepare_chat(self, body: ChatCompletionRequest, key: ApiKey) -> Prepared:
        """Prepare a chat completion. Raises APIError or ValueError."""
        request, parsers, chat, turn = self.prepare_chat_request(body, key)
        wants_logprobs = request.params.logprobs is not None
        choices = [ChatChoiceBuilder(self.llm.tokenizer, i, wants_logprobs, parser) for i, parser in enumerate(parsers)]
        encoder = ChatCompletionEncoder(choices, self.llm.output_processor, chat.body)
        encoder.headers = add_warnings(encoder.headers, chat.notes)
        return Prepared([request], encoder, turn=turn)

    def prepare_chat_request(self, body: ChatCompletionRequest, key: ApiKey) -> PreparedChat:
        """Return the request of a conversation, and a parser for each choice. Raises APIError or ValueError.

        Every API of conversations converts its requests to chat completions, so that all have the same prompt.
        """
        dialect = self.dialect
        chat = self.chat_renderer.render(body, key.name)
        ids = self.llm.tokenizer.encode(chat.prompt, add_special_tokens=False)
        request = replace(
            self._build_base_request(ids, body, key),
            num_system_tokens=chat.num_system_tokens,
            turn_end=count_before(ids, chat.ending, self.llm.tokenizer.token_bytes) if chat.ending else 0,
        )
        max_tokens = self._resolve_max_tokens(body, request, body.requested_tokens)
        logprobs = body.top_logprobs if body.top_logprobs is not None else 0 if body.logprobs else None
        # Half of the tokens are left for a structured output.
        reasoning = dialect.find_reasoning(chat.asked, bool(chat.tools), max_tokens and max_tokens // 2)
        request = replace(
            request,
            params=body.to_sampling_params(max_tokens, logprobs),
            grammar=build_grammar(body, chat.tools, dialect.tool_format, reasoning, dialect.special_tokens),
            shown_tokens=frozenset(dialect.special_tokens.values()),
            reasoning=reasoning and reasoning.after(chat.begun),
        )
        if request.grammar and body.continue_final_message:
            raise APIError(400, "the answer continues a message: it cannot be forced into a format or a tool call")
        parsers = [dialect.create_parser(chat.asked, chat.begun, chat.tools, reasoning) for _ in range(body.n or 1)]
        turn = ChatTurn(self.chat_renderer, chat, parsers, self.keeps_reasoning)
        return PreparedChat(request, parsers, chat, turn)

    def prepare_completion(self, body: CompletionRequest, key: ApiKey) -> Prepared:
        """Prepare a completion of each prompt. Raises APIError or ValueError."""
        prompts = [self._encode_completion(p, body.suffix) for p in body.prompts]
        n = body.n or 1
        echo = bool(body.echo)
        default = max(DEFAULT_MAX_TOKENS, body.min_tokens)
        requested = default if body.requested_tokens is None else body.requested_tokens
        requests = []
        for ids in prompts:
            request = self._build_base_request(ids, body, key)
            max_tokens = self._resolve_max_tokens(body, request, requested or 1)
            request = replace(
                request,
                params=body.to_sampling_params(max_tokens, body.logprobs),
                needs_prompt_logits=echo and body.logprobs is not None,
            )
            requests.append(request)
        tokenizer = self.llm.tokenizer
        prompt_only = body.requested_tokens == 0
        echoes: list[EchoedPrompt | None] = [None] * len(prompts)
        if echo:
            echoes = [
                echo_text(tokenizer, sent, ids) if isinstance(sent, str) else echo_tokens(tokenizer, ids, prompt_only)
                for sent, ids in zip(body.prompts, prompts, strict=True)
            ]
        choices = [
            CompletionChoiceBuilder(
                tokenizer, i, body.logprobs is not None, prompts[i // n], echoes[i // n], prompt_only
            )
            for i in range(len(prompts) * n)
        ]
        return Prepared(requests, CompletionEncoder(choices, self.llm.output_processor, body))

    def _encode_completion(self, prompt: Prompt, suffix: str | None) -> list[int]:
        """Return the token ids of a prompt, or of one whose answer is between it and a suffix. Raises ValueError."""
        if suffix is None or not isinstance(prompt, str):
            return self.llm.encode(prompt)
        self.llm.input_processor.check_length(prompt + suffix)
        return encode_infill(self.llm.tokenizer, prompt, suffix)

    def _build_base_request(self, token_ids: list[int], body: SamplingFields, key: ApiKey) -> GenerateRequest:
        """Build what both endpoints have in common. Raises APIError."""
        if body.speculate not in (None, NO_SPECULATION, *self.drafters):
            raise APIError(400, f"speculate is one of {', '.join([NO_SPECULATION, *self.drafters])}", "speculate")
        if body.pin and body.pin > self.limits.max_pin_seconds:
            raise APIError(400, f"pin is at most {self.limits.max_pin_seconds:g} seconds", "pin")
        salt = compose_salt(key, body.cache_salt)
        return GenerateRequest(
            token_ids,
            kv_policy=body.kv_policy,
            speculate=body.speculate,
            salt=salt,
            owner=key.name,
            explain_prefix=body.explain_prefix,
            lora=self.find_lora(body.model),
        )

    def _resolve_max_tokens(self, body: SamplingFields, request: GenerateRequest, requested: int | None) -> int | None:
        """Return the output tokens to allow: those requested, as far as the server's limit, context and pool go.

        Agents ask for tens of thousands of tokens in every request, whatever the context of the model. Raises APIError
        if fewer are requested than `min_tokens`.
        """
        requested = None if requested == AS_MANY_AS_FIT else requested
        if requested is not None and body.min_tokens > requested:
            message = f"min_tokens is {body.min_tokens}: at most the {requested} output tokens that are asked for"
            raise APIError(400, message, "min_tokens")
        fits = self.llm.input_processor.max_output_tokens(request, len(request.prompt))
        return min(x for x in (requested, self.limits.max_output_tokens, fits) if x is not None)

    # ---- submission ----------------------------------------------------------------------------------------------

    async def handle(
        self, body: GenerationFields, http_request: Request, prepare: Callable[[ApiKey], Prepared], num_choices: int = 1
    ) -> Response:
        """Admit, prepare and submit a request for the served model, with `num_choices` choices. Raises APIError.

        The caller of the returned response ends the admission.
        """
        self.check_model(body.model)
        key: ApiKey = http_request.state.key
        admission: RequestAdmission = http_request.state.admission
        group: RequestGroup | None = None
        try:
            async with self.admit(admission, body.prompt_field, num_choices):
                prepared, request_states = await self.prepare(key.name, partial(prepare, key))
                hints, warnings = read_hints(body.kv_hints, self.limits.max_pin_seconds)
                prepared.encoder.headers = add_warnings(prepared.encoder.headers, warnings)
                pins = [*prepared.pins, Pin(body.pin)] if body.pin else prepared.pins
                interval = self.stream_interval if body.stream else None
                call = CallInfo(body.operation, body.model, admission.trace_headers)
                group = RequestGroup(request_states, key.name, pins, interval, call, hints)
                await self.engine_thread.submit(group)
        except EngineError as error:
            raise APIError(error.status, str(error)) from None
        except BaseException:  # the deadline passed, or the coroutine was cancelled
            if group:
                self.engine_thread.cancel(group)
            raise
        response = GenerationResponse(
            self.engine_thread, admission.deadline, group, prepared.encoder, bool(body.stream)
        )
        if prepared.turn and self.llm.cache.prefix_cache.enabled:
            response.follow_up = partial(self._end_turn, prepared.turn, group)
        return response

    async def _end_turn(self, turn: ChatTurn, group: RequestGroup) -> None:
        """Tell the cache what the next turn begins with of each answer, and what it waits for."""
        owner = group.key_name
        try:
            for index, request in enumerate(group.requests):
                hint = await self.preparation.run(owner, partial(turn.end, index, request))
                await self.engine_thread.hint(hint, request, request.text, owner)
        except (ValueError, RuntimeError, EngineError, APIError) as error:  # no template shows it, or the server ends
            log.debug("the end of a turn is not known: %s", error)

    async def prepare(
        self, key_name: str, prepare: Callable[[], Prepared]
    ) -> tuple[Prepared, list[RequestOutputState]]:
        """Prepare requests and return the engine's, too. Raises ValueError and APIError.

        In threads of the key, because tokenizing a long text takes a while. No thread waits for the trial of a grammar.
        """

        def prepare_plain() -> tuple[Prepared, list[RequestOutputState] | None]:
            prepared = prepare()
            has_grammar = any(request.grammar for request in prepared.requests)
            return prepared, None if has_grammar else self.process(prepared.requests)

        prepared, states = await self.preparation.run(key_name, prepare_plain)
        if states is None:
            for source in {request.grammar for request in prepared.requests if request.grammar}:
                await self.grammar_trials.check(key_name, source, [*self.dialect.special_tokens])
            states = await self.preparation.run(key_name, lambda: self.process(prepared.requests))
        return prepared, states

    def process(self, requests: Sequence[GenerateRequest]) -> list[RequestOutputState]:
        """Return the engine's requests, whose grammars have passed their trial. Raises ValueError."""
        for request in requests:
            self.llm.input_processor.check_policy_cost(request)
        return [state for request in requests for state in self.llm.input_processor.process(request)]

    async def run_admitted(
        self, admission: RequestAdmission, function: Callable[[], T], prompt_field: str = "messages"
    ) -> T:
        """Run a function for a request as a generation is prepared: admitted, in a thread of its key, in time.

        `prompt_field`: the field that has the prompt. Raises APIError.
        """
        async with self.admit(admission, prompt_field):
            return await self.preparation.run(admission.key_name, function)

    @asynccontextmanager
    async def admit(
        self, admission: RequestAdmission, prompt_field: str = "messages", num_choices: int = 1
    ) -> AsyncIterator[None]:
        """Admit a request, and do its work in time. Raises APIError, also for what fails in the context."""
        admission.admit(num_choices)
        admission.begin_work()
        try:
            async with asyncio.timeout_at(admission.deadline):
                yield
        except TimeoutError:
            raise APIError(408, "the request timed out") from None
        except (ValueError, RecursionError) as error:
            raise invalid_request(error, prompt_field) from None

    def close(self) -> None:
        """Parse, try and prepare no more requests."""
        self.body_parser.close()
        self.preparation.close()
        self.grammar_trials.close()


def compose_salt(key: ApiKey, cache_salt: str | None) -> str:
    """Return the salt of a request: prefixes are shared within a key only, and there within a client's own salt."""
    return f"{key.salt}/{cache_salt or ''}" if key.salt or cache_salt else ""
