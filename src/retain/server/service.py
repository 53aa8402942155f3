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
from retain.engine.drafting import NO_SPECULATION
from retain.kv import policies
from retain.llm import LLM
from retain.server import calls
from retain.server.bodies import Answered, ChatBody, CompletionBody, Drawing, Said, SchemaFormat
from retain.server.calls import Ear, Way
from retain.server.errors import Refused
from retain.server.keys import Key
from retain.server.limits import Gate, Limits
from retain.server.shapes import ChatChoice, CompletionChoice, Json
from retain.server.spoken import Saying, Spoken
from retain.server.worker import Failed, News, Order, Worker
from retain.text import form

FEW = 16  # new tokens of a completion, where nobody says how many: OpenAI's default


class Service:
    """One model, served as `name`. Requests may ask for these drafters."""

    def __init__(self, llm: LLM, worker: Worker, limits: Limits, name: str, drafters: Sequence[str]):
        self.llm, self.desk, self.worker, self.limits, self.name = llm, llm.processor, worker, limits, name
        self.gate = Gate(limits, llm.config.max_running_requests)
        self.drafters, self.created = list(drafters), int(time())
        self.way = self._way()

    def _way(self) -> Way | None:
        tokenizer = self.desk.tokenizer
        way = calls.way(tokenizer.chat_template or "")
        if way and way.begin and set(tokenizer.encode(way.begin, add_special_tokens=False)) <= tokenizer.special_token_ids:
            return replace(way, begin="", end="")  # it is not seen in the text
        return way

    # ---- what is asked -------------------------------------------------------------------------------------------

    def known(self, model: str | None) -> None:
        """Raises Refused for a model that is not served. A name is compared, and nothing else."""
        if model not in (None, self.name):
            raise Refused(404, "there is no such model: see /v1/models", "model", "model_not_found")

    def messages(self, given: Sequence[Said | Answered]) -> list[Json]:
        """A conversation as templates want it: text, not parts; arguments as objects."""
        out = []
        for m in given:
            said: Json = {"role": "system" if m.role == "developer" else m.role}
            parts = m.content if isinstance(m.content, list) else []
            said["content"] = "".join(p.text for p in parts) if parts else m.content or ""
            for field in ("name", "tool_call_id"):
                if (value := getattr(m, field, None)) is not None:
                    said[field] = value
            if isinstance(m, Answered) and m.tool_calls:
                called = [c.model_dump() for c in m.tool_calls]
                for c in called:
                    c["function"]["arguments"] = _object(c["function"]["arguments"])
                said["tool_calls"] = called
            out.append(said)
        return out

    def chat(self, body: ChatBody, key: Key) -> tuple[list[GenerateRequest], Callable[[list[RequestOutputState]], Saying]]:
        """A conversation that goes on. Raises Refused or ValueError."""
        tools = [t.model_dump(exclude_none=True) for t in body.tools or []] if body.tool_choice != "none" else []
        if tools and not self.way:
            raise Refused(400, "this model's chat template knows no tools", "tools")
        messages = self.messages(body.messages)
        ids = self.desk.tokenizer.encode_chat(messages, tools=tools or None)
        params = body.params(
            self._most(body, body.max_completion_tokens or body.max_tokens, len(ids)),
            body.top_logprobs if body.top_logprobs is not None else 0 if body.logprobs else None,
        )
        kept = body.kv_policy or ""
        system = self.desk.tokenizer.count_system_tokens(messages) if "protect=system" in kept else 0
        ask = replace(self._ask(ids, body, key), params=params, num_system_tokens=system, grammar=self._form(body, tools))

        def saying(replies: list[RequestOutputState]) -> Saying:
            hear, names = self.way if tools else None, {t["function"]["name"] for t in tools}
            choices = [
                ChatChoice(self.desk.tokenizer, i, params.logprobs is not None, Ear(hear, names) if hear else None)
                for i in range(len(replies))
            ]
            object = "chat.completion"
            usage = body.stream_options is not None and body.stream_options.include_usage
            return Saying(
                *("chatcmpl-", object, f"{object}.chunk", choices),
                told=lambda i: choices[i].whole(),
                parts=lambda news: choices[news.index].part(news),
                usage=usage,
            )

        return [ask], saying

    def _form(self, body: ChatBody, tools: Sequence[Json]) -> str | None:
        """The grammar of the answer, where there is one."""
        wanted = body.response_format
        if tools and body.tool_choice not in (None, "auto"):
            functions = [t["function"] for t in tools]
            if not isinstance(body.tool_choice, str) and body.tool_choice:
                named = body.tool_choice.function.name
                functions = [f for f in functions if f["name"] == named]
            if not functions:
                raise Refused(400, "tool_choice names a tool that is not there", "tool_choice")
            assert self.way
            return form.grammar_from_lark(self.way.grammar(functions))
        if wanted is None or wanted.type == "text":
            return None
        return form.grammar_from_json_schema(wanted.json_schema.schema_ if isinstance(wanted, SchemaFormat) else {"type": "object"})

    def completion(self, body: CompletionBody, key: Key) -> tuple[list[GenerateRequest], Callable[[list[RequestOutputState]], Saying]]:
        """Texts that go on. Raises Refused or ValueError."""
        prompts, n, echo = [self.desk.encode(p) for p in body.prompts], body.n or 1, bool(body.echo)
        scored, silent = echo and body.logprobs is not None, body.max_tokens == 0
        tokens = FEW if body.max_tokens is None else body.max_tokens
        asks = [
            replace(
                self._ask(ids, body, key),
                params=body.params(self._most(body, max(tokens, 1), len(ids), body.max_tokens is None), body.logprobs),
                needs_prompt_logprobs=scored,
            )
            for ids in prompts
        ]

        def saying(replies: list[RequestOutputState]) -> Saying:
            choices = [
                CompletionChoice(
                    *(self.desk.tokenizer, i, body.logprobs is not None),
                    echoed=prompts[i // n] if echo else None,
                    silent=silent,
                )
                for i in range(len(replies))
            ]

            def parts(news: News) -> list[Json]:
                choice = choices[news.index]
                first = echo and not choice.tokens
                return [*([choice.echo(replies[news.index].prompt_logprobs)] if first else []), *choice.part(news)]

            object = "text_completion"
            usage = body.stream_options is not None and body.stream_options.include_usage
            return Saying(
                *("cmpl-", object, object, choices),
                told=lambda i: choices[i].whole(replies[i].prompt_logprobs),
                parts=parts,
                usage=usage,
            )

        return asks, saying

    def _ask(self, ids: list[int], body: Drawing, key: Key) -> GenerateRequest:
        """What both have in common. Raises Refused."""
        if body.speculate not in (None, NO_SPECULATION, *self.drafters):
            raise Refused(400, f"speculate is one of {', '.join([NO_SPECULATION, *self.drafters])}", "speculate")
        if body.pin and body.pin > self.limits.pin_s:
            raise Refused(400, f"pin is at most {self.limits.pin_s:g} seconds", "pin")
        salt = f"{key.salt}/{body.cache_salt or ''}" if key.salt or body.cache_salt else ""
        return GenerateRequest(ids, kv_policy=body.kv_policy, speculate=body.speculate, salt=salt)

    def _most(self, body: Drawing, asked: int | None, prompt: int, fit: bool = False) -> int | None:
        """New tokens of an answer, under the server's own bound. `fit`: nobody asked for so many, so fewer will do."""
        bound = self.limits.tokens
        if asked is not None and not fit:
            if bound is not None and asked > bound:
                raise Refused(
                    400, f"{asked} tokens are more than this server gives in an answer, {bound}", "max_tokens"
                )
            return asked
        policy = policies.parse(body.kv_policy) if body.kv_policy else None
        longest = self.desk.max_output_tokens(prompt, policy) if prompt < self.desk.max_model_len else 1
        return min(x for x in (asked, bound, longest) if x is not None)

    async def answer(
        self, body: Drawing, n: int, key: Key, meant: Callable[[], tuple[list[GenerateRequest], Callable[[list[RequestOutputState]], Saying]]]
    ) -> Response:
        """`n` answers to a call, as `meant` understands it. Raises Refused."""
        until = asyncio.get_running_loop().time() + self.limits.answer_s
        order: Order | None = None
        with ExitStack() as inside:
            inside.enter_context(self.gate.enter(key.name, n))
            try:
                # In another thread: a long text takes a while, and streams must not wait for it.
                replies, saying = await asyncio.to_thread(self._open, meant)
                order = Order(replies, key.name, body.pin or 0.0)
                async with asyncio.timeout_at(until):
                    await self.worker.give(order)
            except ValueError as error:
                raise Refused(400, " ".join(str(error).split())) from None
            except RecursionError:
                raise Refused(400, "the body is nested too deep") from None
            except Failed as error:
                raise Refused(error.status, str(error)) from None
            except BaseException as error:  # hung up, or told to end
                if order:
                    self.worker.cancel(order)
                if isinstance(error, TimeoutError):
                    raise Refused(408, "the answer took too long") from None
                raise
            # From here on the answer lets go of it, however it ends.
            said = saying(replies)
            return Spoken(self.worker, self.name, until, order, said, bool(body.stream), inside.pop_all())

    def _open(
        self, meant: Callable[[], tuple[list[GenerateRequest], Callable[[list[RequestOutputState]], Saying]]]
    ) -> tuple[list[RequestOutputState], Callable[[list[RequestOutputState]], Saying]]:
        asks, saying = meant()
        return [reply for ask in asks for reply in self.desk.process(ask)], saying


def _object(arguments: str) -> Any:
    try:
        return json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
