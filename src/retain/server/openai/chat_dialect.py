"""The dialect of a model's chat answers: how it writes reasoning and tool calls, as its chat template shows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from retain.processing.chat_template import ChatTemplates
from retain.processing.reasoning import Reasoning, ReasoningMarks, ReasoningState, find_reasoning_marks
from retain.processing.tokenizer import Tokenizer
from retain.server.openai.chat_output import (
    ChatOutputParser,
    ReasoningParser,
    TaggedAnswerParser,
    ToolParser,
    continue_answer,
)
from retain.server.tool_format import AnswerParser, ToolFormat
from retain.server.tool_formats import detect_tool_format, find_call_marker


@dataclass(frozen=True)
class ChatDialect:
    """What the chat templates of a model say of its answers.

    `special_tokens`: ids by text of those that the text of an answer shows, because its parser must see them.
    `why_no_tools`: why requests with tools are refused, where there is no format of their calls.
    """

    tool_format: ToolFormat | None
    marks: ReasoningMarks | None  # of conversations without tools
    marks_with_tools: ReasoningMarks | None
    special_tokens: Mapping[str, int]
    why_no_tools: str = ""

    @classmethod
    def read(cls, tokenizer: Tokenizer) -> ChatDialect:
        """Return the dialect that the chat templates of a tokenizer show."""
        templates = tokenizer.chat_templates
        with_tools = templates.find(has_tools=True) or ""
        tool_format = detect_tool_format(with_tools)
        marks = find_reasoning_marks(templates.find(has_tools=False) or "")
        marks_with_tools = find_reasoning_marks(with_tools)
        texts = [text for m in (marks, marks_with_tools) if m for text in m.texts]
        texts += tool_format.markers if tool_format else ()
        special_tokens = tokenizer.find_special_tokens(texts)
        return cls(tool_format, marks, marks_with_tools, special_tokens, _explain_missing_format(templates))

    def find_reasoning(self, prompt: str, has_tools: bool, max_tokens: int | None = None) -> Reasoning | None:
        """Return the reasoning that the answer to a prompt text may have; `max_tokens` before a structured output."""
        marks = self.marks_with_tools if has_tools else self.marks
        return Reasoning(marks, marks.find_state(prompt), max_tokens) if marks else None

    def create_parser(
        self, prompt: str, begun: str, tools: Sequence[Mapping[str, Any]], reasoning: Reasoning | None
    ) -> ChatOutputParser:
        """Create a parser of the answer to a prompt text, and to the text behind it that has `begun` the answer."""
        schemas = {t["function"]["name"]: t["function"].get("parameters") or {} for t in tools}

        def create() -> AnswerParser:
            if self.tool_format and (whole := self.tool_format.create_parser(schemas, prompt)):
                return whole
            is_open = reasoning is not None and reasoning.state is ReasoningState.OPEN
            return TaggedAnswerParser(
                ToolParser(self.tool_format, schemas) if tools and self.tool_format else None,
                ReasoningParser(is_open, [reasoning.marks]) if reasoning else None,
            )

        return continue_answer(create, begun)


def _explain_missing_format(templates: ChatTemplates) -> str:
    """Return why there are no tools, for a template without a known format of calls: what it shows is named."""
    template = templates.find(has_tools=True) or ""
    if "tools" not in template:
        return "this model's chat template does not support tools"
    marker = find_call_marker(template)
    shown = f"({marker})" if marker else "(it shows no marker of calls)"
    return f"this model's chat template teaches a format of tool calls that is not supported {shown}"
