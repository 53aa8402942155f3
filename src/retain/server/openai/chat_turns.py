"""Turns of conversations: what the next one begins with of an answer, and what it waits for.

Chat templates show earlier answers without their reasoning, most of them. What was thought is then a branch that no
later prompt goes on from. Only the template knows, so it is asked: it renders the next turn.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from retain.engine.hints import Hint
from retain.engine.request import Request
from retain.sequences import count_common
from retain.server.openai.chat_output import ChatOutputParser
from retain.server.openai.chat_protocol import (
    AssistantMessageParam,
    FunctionCall,
    InputMessageParam,
    MessageParam,
    ToolCall,
)
from retain.server.openai.chat_renderer import ChatRenderer, RenderedChat
from retain.server.tool_format import ChatOutput

SHOWN = "0"  # by a tool, or said by a user


class ChatTurn:
    """A conversation with a parser of each of its answers. With `keeps_reasoning` all of an answer is kept."""

    def __init__(
        self, renderer: ChatRenderer, chat: RenderedChat, parsers: Sequence[ChatOutputParser], keeps_reasoning: bool
    ):
        self.renderer = renderer
        self.chat = chat
        self.parsers = parsers
        self.keeps_reasoning = keeps_reasoning

    def end(self, index: int, request: Request) -> Hint:
        """Return what the cache is to know of an answer that has ended. Pauses are learned by the tools that it calls.

        It takes as long as rendering the conversation does. Raises ValueError where the template cannot show the turn.
        """
        answer = self.parsers[index].answer
        tools = "+".join(sorted({call.name for call in answer.tool_calls}))
        history_len = len(request.text)
        if (self.chat.tail or (answer.reasoning and not self.keeps_reasoning)) and not self.chat.begun:
            history_len = self._count_history(answer, request)
        return Hint("end_turn", num_kept=history_len, tool=tools)

    def _count_history(self, answer: ChatOutput, request: Request) -> int:
        """Return how many tokens of the text the next turn begins with."""
        tokenizer = self.renderer.input_processor.tokenizer
        turn = {"messages": [*self.chat.body.messages, *_show_turn(answer)]}
        end = {"add_generation_prompt": True, "continue_final_message": False}
        following = self.renderer.render_normalized(self.chat.body.model_copy(update=turn | end)).prompt
        text = self.chat.prompt + tokenizer.decode_raw(request.tokens[len(request.prompt) :])
        return count_before(request.tokens, text[count_common(text, following) :], tokenizer.token_bytes)


def _show_turn(answer: ChatOutput) -> list[MessageParam]:
    """Return an answer as a client sends it back, and what follows it: what its tools show, or what a user says."""
    names = {f"call_{i:024}": call for i, call in enumerate(answer.tool_calls)}
    calls = [
        ToolCall(id=name, function=FunctionCall(name=call.name, arguments=call.arguments))
        for name, call in names.items()
    ]
    sent = AssistantMessageParam(
        role="assistant",
        content=answer.content or None,
        reasoning_content=answer.reasoning,
        tool_calls=calls or None,
    )
    shown = [InputMessageParam(role="tool", content=SHOWN, tool_call_id=name) for name in names]
    return [sent, *(shown or [InputMessageParam(role="user", content=SHOWN)])]


def count_before(ids: Sequence[int], ending: str, token_bytes: Callable[[int], bytes]) -> int:
    """Return how many of the tokens stand before the end of their text."""
    num_bytes = len(ending.encode(errors="surrogatepass"))
    num_before = len(ids)
    while num_bytes > 0 and num_before:
        num_before -= 1
        num_bytes -= len(token_bytes(int(ids[num_before])))
    return num_before
