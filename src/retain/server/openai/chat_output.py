"""The parts of a chat answer: reasoning, content and tool calls, separated while the answer is generated.

However the text is cut into pieces: each parser holds back what may begin its next marker.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

from retain.processing.reasoning import KNOWN_MARKS, ReasoningMarks, ReasoningSplitter, TextPart, partial_mark_length
from retain.server.call_scanner import CallScanner, MarkerScanner, Scan, compile_marks, cut_marks
from retain.server.tool_format import AnswerParser, ChatOutput, ParsedToolCall, Schemas, ToolFormat

NOTHING = ChatOutput("", "", [])


class ReasoningParser:
    """Separates streamed output into reasoning and content. Reasoning is at the beginning of an answer only.

    `prompt_opens_reasoning`: the template ended the prompt with the first marks' beginning, so that the output starts
    inside. `marks`: those that the output may have.
    """

    def __init__(self, prompt_opens_reasoning: bool, marks: Sequence[ReasoningMarks] = KNOWN_MARKS):
        self._splitter = ReasoningSplitter([m for m in marks if not m.repeats], prompt_opens_reasoning)
        self._unwrapper = AnswerUnwrapper([m for m in marks if m.answer_begin])

    def has_left_reasoning(self, text: str) -> bool:
        """Return whether the text of an answer, whose marks were found, has the end of its reasoning."""
        marks = self._splitter.marks
        return marks is None or marks.end in text

    def feed(self, text: str, finished: bool) -> tuple[str, str]:
        """Add generated text. Returns what is certainly reasoning, and what is certainly content."""
        pieces = self._splitter.feed(text, finished)
        reasoning = "".join(piece for part, piece in pieces if part is TextPart.REASONING)
        content = "".join(piece for part, piece in pieces if part is TextPart.ANSWER)
        return reasoning, self._unwrapper.feed(content, self._splitter.marks is not None, finished)


class AnswerUnwrapper:
    """Leaves out the blank lines behind reasoning, and the marks that some models write around what follows it."""

    def __init__(self, marks: Sequence[ReasoningMarks]):
        self._marks = tuple(marks)
        self._is_at_start = True
        self._end = ""  # the mark that ends the answer
        self._held = ""

    def feed(self, text: str, follows_reasoning: bool, finished: bool) -> str:
        """Add text of the answer. Returns what is certainly content."""
        text = self._held + text
        self._held = ""
        if self._is_at_start:
            visible = text.lstrip("\n") if follows_reasoning or self._end else text
            if not visible and not finished:
                return ""
            marks = next((m for m in self._marks if visible.startswith(m.answer_begin)), None)
            if not marks and not finished and any(m.answer_begin.startswith(visible) for m in self._marks):
                self._held = visible
                return ""
            if marks:  # blank lines behind the mark are no content either, and no second mark is expected
                self._marks = ()
                self._end = marks.answer_end
                return self.feed(visible[len(marks.answer_begin) :], True, finished)
            self._is_at_start = False
            text = visible
        return self._drop_end(text, finished) if self._end else text

    def _drop_end(self, text: str, finished: bool) -> str:
        at = text.find(self._end)
        if at >= 0:
            content = text[:at].removesuffix("\n") + text[at + len(self._end) :]
            self._end = ""
            return content
        held = 0 if finished else max(partial_mark_length(text, mark) for mark in (f"\n{self._end}", self._end))
        self._held = text[len(text) - held :]
        return text[: len(text) - held]


class ToolParser:
    """Separates streamed output into content and tool calls. A call of an unknown tool counts as content.

    `tools`: names, or the schemas of parameters by name, which tell the types of values that a model writes as text.
    """

    def __init__(self, tool_format: ToolFormat, tools: Collection[str] | Schemas):
        self._format = tool_format
        self._tools = tools
        self._schemas: Schemas = tools if isinstance(tools, Mapping) else {}
        self._begins = (*tool_format.begins, *tool_format.bare_begins)
        self._begin = ""  # of the call that is not yet complete
        self._scanner: CallScanner | None = None  # of that call
        self._held = ""  # end of the text, which may belong to the next marker
        self._body_parts: list[str] = []  # of the call
        self._trusts_quotes = True

    def feed(self, text: str) -> tuple[str, list[ParsedToolCall]]:
        """Add generated text. Returns the text that is certainly content, and the calls that are complete."""
        return self._read(text, finished=False)

    def close(self) -> tuple[str, list[ParsedToolCall]]:
        """End the output. Returns the remaining content and calls."""
        content, calls = self._read("", finished=True)
        if self._scanner is None:
            return content, calls
        body = "".join(self._body_parts)
        self._body_parts.clear()
        begin = self._begin
        self._scanner = None
        if not self._format.needs_end and (known := self._parse_known_tools(body)):
            return content, calls + known
        if not self._trusts_quotes or not any(end in body for end in self._format.ends):
            return content + begin + body, calls
        self._trusts_quotes = False  # a quote that never ended has hidden the end of the call
        more, later = self._read(begin + body, finished=False)
        rest, last = self.close()
        return content + more + rest, calls + later + last

    def _read(self, text: str, finished: bool) -> tuple[str, list[ParsedToolCall]]:
        content: list[str] = []
        calls: list[ParsedToolCall] = []
        text = self._held + text
        position: int | None = 0
        start = 0
        while position is not None:
            start = position
            if self._scanner is None:
                position = self._read_content(text, start, content, finished)
            else:
                position = self._read_call(text, start, content, calls, finished)
        return "".join(content), calls

    def _read_content(self, text: str, start: int, content: list[str], finished: bool) -> int | None:
        """Read up to the beginning of a call. Returns where its body begins; None if there is no more text."""
        found = compile_marks(self._begins).search(text, start)
        if not found:
            cut = cut_marks(text, start, self._begins, finished)
            content.append(text[start:cut])
            self._held = text[cut:]
            return None
        at = found.start()
        begin = found[0]
        content.append(text[start:at])
        is_bare = begin in self._format.bare_begins
        self._begin = "" if is_bare else begin
        trusted = self._format.create_scanner(begin)
        self._scanner = trusted if self._trusts_quotes else MarkerScanner(self._format.ends, self._format.begins)
        return at if is_bare else at + len(begin)

    def _read_call(
        self, text: str, start: int, content: list[str], calls: list[ParsedToolCall], finished: bool
    ) -> int | None:
        """Read up to the end of a call. Returns where the text behind it begins; None if there is no more text."""
        assert self._scanner
        scanned = self._scanner.scan(text, start, finished)
        self._body_parts.append(text[start : scanned.body_end])
        if scanned.found is Scan.MORE:
            self._held = text[scanned.end :]
            return None
        body = "".join(self._body_parts)
        self._body_parts.clear()
        self._scanner = None
        known = self._parse_known_tools(body) if scanned.found is Scan.CALL else []
        calls += known
        if not known:
            content += [self._begin, body, text[scanned.body_end : scanned.end]]
        return scanned.end

    def _parse_known_tools(self, text: str) -> list[ParsedToolCall]:
        calls = self._format.parse(text, self._schemas)
        return calls if calls and all(call.name in self._tools for call in calls) else []


class TaggedAnswerParser:
    """Separates an answer that has reasoning and tool calls between tags. None: the model's template has none."""

    def __init__(self, tool_parser: ToolParser | None = None, reasoning_parser: ReasoningParser | None = None):
        self._tool_parser = tool_parser
        self._reasoning_parser = reasoning_parser

    def feed(self, text: str, finished: bool) -> ChatOutput:
        """Add generated text. Returns the reasoning, content and calls that are certain; all once it has finished."""
        reasoning = ""
        content = text
        calls: list[ParsedToolCall] = []
        if self._reasoning_parser:
            reasoning, content = self._reasoning_parser.feed(text, finished)
        if self._tool_parser:
            content, calls = self._tool_parser.feed(content)
            if finished:
                rest, more = self._tool_parser.close()
                content += rest
                calls += more
        return ChatOutput(reasoning, content, calls)

    def has_left_reasoning(self, text: str) -> bool:
        """Return whether the text of an answer has the end of its reasoning; True if the model writes none."""
        return self._reasoning_parser is None or self._reasoning_parser.has_left_reasoning(text)


class ChatOutputParser:
    """Separates the text of one choice, which may continue text of the prompt. By default all of it is content.

    `skipped`: text of the prompt that the parser may still return.
    """

    def __init__(self, parser: AnswerParser | None = None, skipped: ChatOutput = NOTHING):
        self._parser: AnswerParser = parser or TaggedAnswerParser()
        self._skipped = skipped
        self._outputs: list[ChatOutput] = []

    @property
    def answer(self) -> ChatOutput:
        """All that was returned."""
        reasoning, content, calls = zip(*self._outputs, strict=True) if self._outputs else ((), (), ())
        return ChatOutput("".join(reasoning), "".join(content), [call for some in calls for call in some])

    def has_left_reasoning(self, text: str) -> bool:
        """Return whether what comes after the reasoning has begun in the text of an answer."""
        return self._parser.has_left_reasoning(text)

    def feed(self, text: str, finished: bool) -> ChatOutput:
        """Add generated text. Returns the parts that are certain; all of them once the choice has finished."""
        output = self._parser.feed(text, finished)
        skipped = self._skipped
        if any(skipped) and any(output):
            reasoning, skipped_reasoning = _drop_skipped(output.reasoning, skipped.reasoning)
            content, skipped_content = _drop_skipped(output.content, skipped.content)
            self._skipped = ChatOutput(skipped_reasoning, skipped_content, [])
            output = ChatOutput(reasoning, content, output.tool_calls)
        if any(output):
            self._outputs.append(output)
        return output


def continue_answer(create: Callable[[], AnswerParser], begun: str) -> ChatOutputParser:
    """Create a parser of an answer that text of the prompt has `begun`: only what follows is returned."""
    parser = create()
    parser.feed(begun, finished=False)
    ended = create()
    ended.feed(begun, finished=False)
    return ChatOutputParser(parser, ended.feed("", finished=True))


def _drop_skipped(text: str, skipped: str) -> tuple[str, str]:
    """Return text without what its beginning shares with skipped text, and what is still to skip.

    Nothing is, where the text begins otherwise: skipped text has become part of a marker or of a call.
    """
    pairs = enumerate(zip(text, skipped, strict=False))
    shared = next((i for i, (a, b) in pairs if a != b), min(len(text), len(skipped)))
    return text[shared:], skipped[shared:] if shared else ""
