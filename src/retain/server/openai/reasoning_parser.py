"""Reasoning in model output: detect the think tags that a chat template teaches, and split reasoning from content."""

from __future__ import annotations

from copy import copy

from retain.server.openai.tool_parser import partial_marker_length

BEGIN = "<think>"
END = "</think>"


def supports_reasoning(template: str) -> bool:
    """Return whether a chat template writes reasoning between think tags."""
    return END in template


class ReasoningParser:
    """Separates streamed output into reasoning and content. Reasoning is at the beginning of an answer only.

    `prompt_opens_reasoning`: the template ended the prompt with the begin tag, so that the output starts inside.
    """

    def __init__(self, prompt_opens_reasoning: bool):
        self._buffer = ""
        self._blanks: list[str] = []  # that precede all other text: they are content if no reasoning follows
        self._state = "reasoning" if prompt_opens_reasoning else "start"

    def copy(self) -> ReasoningParser:
        """Return a parser that goes on from here by itself."""
        other = copy(self)
        other._blanks = [*self._blanks]
        return other

    def feed(self, text: str, finished: bool) -> tuple[str, str]:
        """Add generated text. Returns what is certainly reasoning, and what is certainly content."""
        self._buffer += text
        if self._state == "start":
            visible = self._buffer.lstrip()
            self._blanks.append(self._buffer[: len(self._buffer) - len(visible)])
            self._buffer = visible
            if visible.startswith(BEGIN):
                self._state = "reasoning"
                self._buffer = visible[len(BEGIN) :]
            elif finished or not BEGIN.startswith(visible):
                self._state = "content"
                self._buffer = "".join([*self._blanks, visible])
        if self._state == "reasoning":
            reasoning, tag, after = self._buffer.partition(END)
            if tag:
                self._state = "blank"
                self._buffer = after
            else:
                cut = len(reasoning) - (0 if finished else partial_marker_length(reasoning, END))
                self._buffer = reasoning[cut:]
                reasoning = reasoning[:cut]
            return reasoning, self._take_content()
        return "", self._take_content()

    def _take_content(self) -> str:
        """Return the buffered content, without the blank lines that follow the end tag."""
        if self._state == "blank":
            self._buffer = self._buffer.lstrip("\n")
            self._state = "content" if self._buffer else "blank"
        if self._state != "content":
            return ""
        content = self._buffer
        self._buffer = ""
        return content
