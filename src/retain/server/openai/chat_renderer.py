"""Conversations as the model reads them. Each is rendered once, and every API of conversations reads the record."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial

from retain.processing.input import InputProcessor
from retain.sequences import count_common
from retain.server.openai.chat_dialect import ChatDialect
from retain.server.openai.chat_protocol import ChatCompletionRequest, InputMessageParam
from retain.server.openai.errors import APIError
from retain.server.openai.messages import fit_messages, render_prompt, to_template_messages, to_template_tools
from retain.server.openai.prompt_normalization import normalize_prompt, without_header
from retain.server.openai.protocol import Json
from retain.server.openai.system_tails import SystemTails

MOVED_TAIL = "prompt normalized: the end of the system prompt, which changes, was moved behind the history"
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RenderedChat:
    """A conversation with the text of its prompt.

    `body` is the conversation as later turns have it, and `notes` warn of what was changed for that. `begun` is the end
    of the prompt, where the answer has begun already. `num_system_tokens` are those that the policy keeps.
    """

    body: ChatCompletionRequest
    notes: list[str]
    tools: Sequence[Json]
    messages: Sequence[Json]  # as the template takes them
    prompt: str
    begun: str
    num_system_tokens: int = 0
    ending: str = ""  # the end of the prompt that later turns lack: it begins the answer
    tail: str = ""  # of the system prompt, where it stands behind the history

    @property
    def asked(self) -> str:
        """The prompt up to the answer."""
        return self.prompt[: len(self.prompt) - len(self.begun)]


class ChatRenderer:
    """Renders conversations for a model. With `normalizes`, those that say the same begin alike."""

    def __init__(self, input_processor: InputProcessor, dialect: ChatDialect, normalizes: bool):
        self.input_processor = input_processor
        self.dialect = dialect
        self.normalizes = normalizes
        self.system_tails = SystemTails()
        self._has_suggested = False
        self._generation_prompt = lru_cache(maxsize=64)(self._find_generation_prompt)

    def render(self, body: ChatCompletionRequest, key_name: str) -> RenderedChat:
        """Render a conversation that is to be answered. Raises APIError or ValueError.

        Which end of a system prompt changes is learned from it, for later conversations of the API key.
        """
        body, notes = self._normalize(body)
        if self.normalizes:
            self.system_tails.note(key_name, body)
        chat = self._render_split(body, notes, key_name)
        if not self.input_processor.protects_system(body.kv_policy):
            return chat
        return replace(chat, num_system_tokens=self.input_processor.tokenizer.count_system_tokens(chat.messages))

    def render_prompt(self, body: ChatCompletionRequest, key_name: str) -> RenderedChat:
        """Render a conversation whose tokens are compared or counted only. Raises APIError or ValueError."""
        return self._render_split(*self._normalize(body), key_name)

    def render_normalized(self, body: ChatCompletionRequest) -> RenderedChat:
        """Render a conversation as it is. Raises APIError or ValueError."""
        tool_format = self.dialect.tool_format
        tools = to_template_tools(body)
        if tools and not tool_format:
            raise APIError(400, self.dialect.why_no_tools, "tools")
        tokenizer = self.input_processor.tokenizer
        sent = to_template_messages(body.messages)
        messages = fit_messages(sent, tokenizer, tool_format)
        prompt = render_prompt(body, messages, tools, tokenizer, tool_format)
        self.input_processor.check_length(prompt)
        last = sent[-1]["content"].strip() if body.continue_final_message else ""
        begun = prompt[prompt.rindex(last) :] if last else ""
        added = self._generation_prompt(json.dumps(body.template_variables)) if body.add_generation_prompt else ""
        added = added if prompt.endswith(added) else ""
        return RenderedChat(body, [], tools, messages, prompt, begun, ending=added)

    def _normalize(self, body: ChatCompletionRequest) -> tuple[ChatCompletionRequest, list[str]]:
        """Return a conversation without what differs in each request, and what was changed, if that is wanted."""
        if self.normalizes:
            return normalize_prompt(body)
        if not self._has_suggested and without_header(body):
            self._has_suggested = True
            log.warning("a client begins each prompt with another line: --normalize-prompts drops it (logged once)")
        return body, []

    def _render_split(self, body: ChatCompletionRequest, notes: list[str], key_name: str) -> RenderedChat:
        """Render a conversation. An end of its system prompt that is known to change stands behind the history."""
        if (parts := self.system_tails.split(key_name, body)) and self._shows_tails:
            head, tail = parts
            first = body.messages[0].model_copy(update={"content": head})
            shown = body.model_copy(update={"messages": [first, *body.messages[1:]]})
            if moved := self._render_behind(shown, tail):
                return replace(moved, notes=[*notes, MOVED_TAIL])
        return replace(self.render_normalized(body), notes=notes)

    def _render_behind(self, body: ChatCompletionRequest, tail: str) -> RenderedChat | None:
        """Render a conversation with the tail of its system prompt behind its history.

        Returns None where the template refuses that, or shows the history otherwise then.
        """
        if len(body.messages) < 2 or body.continue_final_message:
            return None
        added = InputMessageParam(role="system", content=tail.strip("\n"))
        ended = body.model_copy(update={"add_generation_prompt": False})
        last = to_template_messages(body.messages)[-1]
        try:
            chat = self.render_normalized(body.model_copy(update={"messages": [*body.messages, added]}))
            history = self.render_normalized(ended).prompt
            last_text = "" if last["role"] == "system" else last["content"].strip()  # some show all of these first
            num_needed = history.rindex(last_text) + len(last_text)
        except ValueError:
            return None
        num_common = count_common(chat.prompt, history)
        if num_common < num_needed or tail.strip() not in chat.prompt[num_common:]:
            return None
        return replace(chat, body=body, ending=chat.prompt[num_common:], tail=tail)

    @cached_property
    def _shows_tails(self) -> bool:
        """Whether the template shows a tail behind a question, and behind results of tools and what was thought.

        A prompt that has its tail in one place in one turn, and elsewhere in the next, is worse than one that never
        moves it.
        """
        call = {"id": "call_000000000", "type": "function", "function": {"name": "f", "arguments": "{}"}}
        question: list[Json] = [{"role": "system", "content": "0"}, {"role": "user", "content": "1"}]
        called: list[Json] = [
            {"role": "assistant", "content": None, "reasoning_content": "2", "tool_calls": [call]},
            {"role": "tool", "content": "3", "tool_call_id": call["id"]},
        ]
        tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
        fields: list[Json] = [{"messages": question}]
        if self.dialect.tool_format:
            fields.append({"messages": question + called, "tools": tools})
        bodies = (ChatCompletionRequest.model_validate({"model": "", **one}) for one in fields)
        return all(self._render_behind(body, "TAIL") for body in bodies)

    def _find_generation_prompt(self, variables: str) -> str:
        """Return what `add_generation_prompt` adds to a prompt, under variables as JSON; "" where that is unclear."""
        render = partial(
            self.input_processor.tokenizer.apply_chat_template,
            [{"role": "user", "content": "0"}],
            variables=json.loads(variables),
        )
        try:
            ended = render(add_generation_prompt=False)
            begun = render()
        except ValueError:
            return ""
        return begun.removeprefix(ended) if begun.startswith(ended) else ""
