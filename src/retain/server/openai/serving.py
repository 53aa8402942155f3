"""What is asked over HTTP, as the engine understands it: bodies become asks, and asks an order.

What is not known here: routes, keys' secrets, how answers are sent.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from time import time
from typing import Any

from starlette.responses import Response

from retain.desk import GenerateRequest, RequestOutputState
from retain.engine.spec_decode.speculator import NO_SPECULATION
from retain.kv.eviction import policies
from retain.llm import LLM
from retain.processing import grammar
from retain.server.admission import AdmissionControl, Limits
from retain.server.auth import ApiKey
from retain.server.engine_thread import EngineError, EngineThread, OutputDelta, RequestGroup
from retain.server.openai import tool_parser
from retain.server.openai.errors import APIError
from retain.server.openai.protocol import (
    AssistantMessageParam,
    ChatCompletionRequest,
    CompletionRequest,
    InputMessageParam,
    JsonSchemaFormat,
    SamplingFields,
)
from retain.server.openai.responses import ChatChoiceBuilder, CompletionChoiceBuilder, Json
from retain.server.openai.streaming import GenerationResponse, ResponseBuilder
from retain.server.openai.tool_parser import ToolFormat, ToolParser

DEFAULT_MAX_TOKENS = 16  # new tokens of a completion, where nobody says how many: OpenAI's default


class OpenAIServing:
    """One model, served as `name`. Requests may ask for these drafters."""

    def __init__(self, llm: LLM, engine_thread: EngineThread, limits: Limits, model_name: str, drafters: Sequence[str]):
        self.llm, self.processor, self.engine_thread, self.limits, self.model_name = (
            llm,
            llm.processor,
            engine_thread,
            limits,
            model_name,
        )
        self.admission = AdmissionControl(limits, llm.config.max_running_requests)
        self.drafters, self.created = list(drafters), int(time())
        self.tool_format = self._detect_tool_format()

    def _detect_tool_format(self) -> ToolFormat | None:
        tokenizer = self.processor.tokenizer
        way = tool_parser.detect_tool_format(tokenizer.chat_template or "")
        if (
            way
            and way.begin
            and set(tokenizer.encode(way.begin, add_special_tokens=False)) <= tokenizer.special_token_ids
        ):
            return replace(way, begin="", end="")  # it is not seen in the text
        return way

    # ---- what is asked -------------------------------------------------------------------------------------------

    def check_model(self, model: str | None) -> None:
        """Raises Refused for a model that is not served. A name is compared, and nothing else."""
        if model not in (None, self.model_name):
            raise APIError(404, "there is no such model: see /v1/models", "model", "model_not_found")

    def to_template_messages(self, messages: Sequence[InputMessageParam | AssistantMessageParam]) -> list[Json]:
        """A conversation as templates want it: text, not parts; arguments as objects."""
        out = []
        for m in messages:
            said: Json = {"role": "system" if m.role == "developer" else m.role}
            parts = m.content if isinstance(m.content, list) else []
            said["content"] = "".join(p.text for p in parts) if parts else m.content or ""
            for field in ("name", "tool_call_id"):
                if (value := getattr(m, field, None)) is not None:
                    said[field] = value
            if isinstance(m, AssistantMessageParam) and m.tool_calls:
                called = [c.model_dump() for c in m.tool_calls]
                for c in called:
                    c["function"]["arguments"] = _parse_arguments(c["function"]["arguments"])
                said["tool_calls"] = called
            out.append(said)
        return out

    def prepare_chat(
        self, body: ChatCompletionRequest, key: ApiKey
    ) -> tuple[list[GenerateRequest], Callable[[list[RequestOutputState]], ResponseBuilder]]:
        """A conversation that goes on. Raises Refused or ValueError."""
        tools = [t.model_dump(exclude_none=True) for t in body.tools or []] if body.tool_choice != "none" else []
        if tools and not self.tool_format:
            raise APIError(400, "this model's chat template knows no tools", "tools")
        messages = self.to_template_messages(body.messages)
        ids = self.processor.tokenizer.encode_chat(messages, tools=tools or None)
        params = body.to_sampling_params(
            self._resolve_max_tokens(body, body.max_completion_tokens or body.max_tokens, len(ids)),
            body.top_logprobs if body.top_logprobs is not None else 0 if body.logprobs else None,
        )
        kept = body.kv_policy or ""
        system = self.processor.tokenizer.count_system_tokens(messages) if "protect=system" in kept else 0
        ask = replace(
            self._build_base_request(ids, body, key),
            params=params,
            num_system_tokens=system,
            grammar=self._build_grammar(body, tools),
        )

        def make_response_builder(request_states: list[RequestOutputState]) -> ResponseBuilder:
            hear, names = self.tool_format if tools else None, {t["function"]["name"] for t in tools}
            choices = [
                ChatChoiceBuilder(
                    self.processor.tokenizer, i, params.logprobs is not None, ToolParser(hear, names) if hear else None
                )
                for i in range(len(request_states))
            ]
            object = "chat.completion"
            usage = body.stream_options is not None and body.stream_options.include_usage
            return ResponseBuilder(
                *("chatcmpl-", object, f"{object}.chunk", choices),
                build_choice=lambda i: choices[i].build(),
                build_chunks=lambda news: choices[news.index].build_chunks(news),
                include_usage=usage,
            )

        return [ask], make_response_builder

    def _build_grammar(self, body: ChatCompletionRequest, tools: Sequence[Json]) -> str | None:
        """The grammar of the answer, where there is one."""
        wanted = body.response_format
        if tools and body.tool_choice not in (None, "auto"):
            functions = [t["function"] for t in tools]
            if not isinstance(body.tool_choice, str) and body.tool_choice:
                named = body.tool_choice.function.name
                functions = [f for f in functions if f["name"] == named]
            if not functions:
                raise APIError(400, "tool_choice names a tool that is not there", "tool_choice")
            assert self.tool_format
            return grammar.grammar_from_lark(self.tool_format.build_grammar(functions))
        if wanted is None or wanted.type == "text":
            return None
        return grammar.grammar_from_json_schema(
            wanted.json_schema.schema_ if isinstance(wanted, JsonSchemaFormat) else {"type": "object"}
        )

    def prepare_completion(
        self, body: CompletionRequest, key: ApiKey
    ) -> tuple[list[GenerateRequest], Callable[[list[RequestOutputState]], ResponseBuilder]]:
        """Texts that go on. Raises Refused or ValueError."""
        prompts, n, echo = [self.processor.encode(p) for p in body.prompts], body.n or 1, bool(body.echo)
        scored, silent = echo and body.logprobs is not None, body.max_tokens == 0
        tokens = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
        asks = [
            replace(
                self._build_base_request(ids, body, key),
                params=body.to_sampling_params(
                    self._resolve_max_tokens(body, max(tokens, 1), len(ids), body.max_tokens is None), body.logprobs
                ),
                needs_prompt_logprobs=scored,
            )
            for ids in prompts
        ]

        def make_response_builder(request_states: list[RequestOutputState]) -> ResponseBuilder:
            choices = [
                CompletionChoiceBuilder(
                    *(self.processor.tokenizer, i, body.logprobs is not None),
                    echo_token_ids=prompts[i // n] if echo else None,
                    prompt_only=silent,
                )
                for i in range(len(request_states))
            ]

            def build_chunks(delta: OutputDelta) -> list[Json]:
                choice = choices[delta.index]
                first = echo and not choice.num_tokens
                return [
                    *([choice.build_echo_chunk(request_states[delta.index].prompt_logprobs)] if first else []),
                    *choice.build_chunks(delta),
                ]

            object = "text_completion"
            usage = body.stream_options is not None and body.stream_options.include_usage
            return ResponseBuilder(
                *("cmpl-", object, object, choices),
                build_choice=lambda i: choices[i].build(request_states[i].prompt_logprobs),
                build_chunks=build_chunks,
                include_usage=usage,
            )

        return asks, make_response_builder

    def _build_base_request(self, token_ids: list[int], body: SamplingFields, key: ApiKey) -> GenerateRequest:
        """What both have in common. Raises Refused."""
        if body.speculate not in (None, NO_SPECULATION, *self.drafters):
            raise APIError(400, f"speculate is one of {', '.join([NO_SPECULATION, *self.drafters])}", "speculate")
        if body.pin and body.pin > self.limits.max_pin_s:
            raise APIError(400, f"pin is at most {self.limits.max_pin_s:g} seconds", "pin")
        salt = f"{key.salt}/{body.cache_salt or ''}" if key.salt or body.cache_salt else ""
        return GenerateRequest(token_ids, kv_policy=body.kv_policy, speculate=body.speculate, salt=salt)

    def _resolve_max_tokens(
        self, body: SamplingFields, requested: int | None, num_prompt_tokens: int, is_default: bool = False
    ) -> int | None:
        """New tokens of an answer, under the server's own bound. `fit`: nobody asked for so many, so fewer will do."""
        bound = self.limits.max_output_tokens
        if requested is not None and not is_default:
            if bound is not None and requested > bound:
                raise APIError(
                    400, f"{requested} tokens are more than this server gives in an answer, {bound}", "max_tokens"
                )
            return requested
        policy = policies.parse(body.kv_policy) if body.kv_policy else None
        longest = (
            self.processor.max_output_tokens(num_prompt_tokens, policy)
            if num_prompt_tokens < self.processor.max_model_len
            else 1
        )
        return min(x for x in (requested, bound, longest) if x is not None)

    async def handle(
        self,
        body: SamplingFields,
        num_choices: int,
        key: ApiKey,
        prepare: Callable[[], tuple[list[GenerateRequest], Callable[[list[RequestOutputState]], ResponseBuilder]]],
    ) -> Response:
        """`n` answers to a call, as `meant` understands it. Raises Refused."""
        until = asyncio.get_running_loop().time() + self.limits.request_timeout
        order: RequestGroup | None = None
        with ExitStack() as inside:
            inside.enter_context(self.admission.admit(key.name, num_choices))
            try:
                # In another thread: a long text takes a while, and streams must not wait for it.
                replies, saying = await asyncio.to_thread(self._process, prepare)
                order = RequestGroup(replies, key.name, body.pin or 0.0)
                async with asyncio.timeout_at(until):
                    await self.engine_thread.submit(order)
            except ValueError as error:
                raise APIError(400, " ".join(str(error).split())) from None
            except RecursionError:
                raise APIError(400, "the body is nested too deep") from None
            except EngineError as error:
                raise APIError(error.status, str(error)) from None
            except BaseException as error:  # hung up, or told to end
                if order:
                    self.engine_thread.cancel(order)
                if isinstance(error, TimeoutError):
                    raise APIError(408, "the answer took too long") from None
                raise
            # From here on the answer lets go of it, however it ends.
            said = saying(replies)
            return GenerationResponse(
                self.engine_thread, self.model_name, until, order, said, bool(body.stream), inside.pop_all()
            )

    def _process(
        self, prepare: Callable[[], tuple[list[GenerateRequest], Callable[[list[RequestOutputState]], ResponseBuilder]]]
    ) -> tuple[list[RequestOutputState], Callable[[list[RequestOutputState]], ResponseBuilder]]:
        asks, saying = prepare()
        return [reply for ask in asks for reply in self.processor.process(ask)], saying


def _parse_arguments(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text
