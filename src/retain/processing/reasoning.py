"""Reasoning in generated text: the marks that families write around it, and the parts of a text between them.

What vLLM calls a reasoning parser. The marks are facts of the published chat templates: of DeepSeek-R1, Qwen, GLM-4.5
and most others; of Granite 3.3 and ERNIE 4.5, with marks around the answer. Then Magistral and Ministral 3, Gemma 4,
Seed-OSS, Command, and gpt-oss, whose reasoning is a message to a channel.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import dataclass, replace
from enum import Enum


@dataclass(frozen=True)
class ReasoningMarks:
    """Texts around reasoning, and those around the answer behind it, if a model writes any.

    `repeats`: an answer may have reasoning several times. Otherwise only its beginning is searched. `families`: model
    types of which published chat templates write these marks.
    """

    begin: str
    end: str
    answer_begin: str = ""
    answer_end: str = ""
    repeats: bool = False
    families: tuple[str, ...] = ()

    @property
    def texts(self) -> tuple[str, ...]:
        """The texts of all marks: of the reasoning, and of the answer behind it."""
        return self.begin, self.end, self.answer_begin, self.answer_end

    def find_state(self, prompt: str) -> ReasoningState:
        """Return whether the answer to a prompt text begins inside of reasoning."""
        text = prompt.rstrip()
        if text.endswith(self.begin):
            return ReasoningState.OPEN
        return ReasoningState.CLOSED if text.endswith(self.end) else ReasoningState.POSSIBLE


class ReasoningState(Enum):
    """What a prompt says of the reasoning in its answer: it has begun it, it has ended it, or neither."""

    OPEN = "open"
    CLOSED = "closed"
    POSSIBLE = "possible"


@dataclass(frozen=True)
class Reasoning:
    """The reasoning of one answer: its marks, and what the prompt says of it.

    `max_tokens`: those that it may have before an answer that a grammar demands.
    """

    marks: ReasoningMarks
    state: ReasoningState
    max_tokens: int | None = None

    def after(self, text: str) -> Reasoning:
        """Return the reasoning of what goes on from a text that has begun the answer."""
        if not text.strip():
            return self
        splitter = self.create_splitter()
        splitter.feed(text, finished=False)
        return replace(self, state=ReasoningState.OPEN if splitter.is_in_reasoning else ReasoningState.CLOSED)

    def create_splitter(self) -> ReasoningSplitter:
        """Create a splitter of the answer into reasoning and content."""
        return ReasoningSplitter([self.marks], self.state is ReasoningState.OPEN)


# Those of <think> are of distilled models, too: DeepSeek-R1's are Llama and Qwen 2.
THINKING_FAMILIES = (
    *("deepseek_v3", "ernie4_5", "glm4_moe", "glm4_moe_lite", "granite", "llama", "nemotron_h", "olmo3", "qwen2"),
    *("qwen3", "qwen3_moe", "qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text", "smollm3"),
)
KNOWN_MARKS = (
    ReasoningMarks("<think>", "</think>", "<response>", "</response>", families=THINKING_FAMILIES),
    ReasoningMarks("[THINK]", "[/THINK]", families=("ministral3", "mistral")),
    ReasoningMarks("<|channel>thought", "<channel|>", families=("gemma4", "gemma4_text")),
    ReasoningMarks("<seed:think>", "</seed:think>", families=("seed_oss",)),
    ReasoningMarks(
        begin="<|START_THINKING|>",
        end="<|END_THINKING|>",
        answer_begin="<|START_RESPONSE|>",
        answer_end="<|END_RESPONSE|>",
        families=("cohere2",),
    ),
    ReasoningMarks("<|channel|>analysis<|message|>", "<|end|>", repeats=True, families=("gpt_oss",)),
)


def find_reasoning_marks(template: str) -> ReasoningMarks | None:
    """Return the marks that a chat template writes around reasoning; None if it writes none that are known.

    Templates may write the end alone: generated text then has the beginning.
    """
    marks = next((marks for marks in KNOWN_MARKS if marks.end in template), None)
    if marks is None or (marks.repeats and marks.begin not in template):
        return None
    return marks if marks.answer_end in template else replace(marks, answer_begin="", answer_end="")


class TextPart(Enum):
    """What a piece of generated text is."""

    REASONING = "reasoning"
    MARK = "mark"  # a mark of reasoning, with blanks before it
    ANSWER = "answer"


Pieces = list[tuple[TextPart, str]]


class ReasoningSplitter:
    """Splits generated text into reasoning, its marks and the answer, however the text is cut.

    The joined pieces are the text. Each piece is certain: what may begin a mark is held back.
    """

    def __init__(self, marks: Sequence[ReasoningMarks], is_open: bool):
        """`marks`: those that the text may have. `is_open`: it starts inside of reasoning between the first ones."""
        self.marks: ReasoningMarks | None = marks[0] if is_open else None  # of the reasoning that has begun last
        self._candidates = tuple(marks)
        self._step = self._read_reasoning if is_open else self._read_start
        self._held = ""  # may begin a mark
        self._blanks: list[str] = []  # before all other text

    def copy(self) -> ReasoningSplitter:
        """Return a splitter that goes on from here by itself."""
        other = copy(self)
        other._blanks = [*self._blanks]
        other._step = getattr(other, self._step.__name__)
        return other

    @property
    def is_in_answer(self) -> bool:
        """Whether the answer has begun."""
        return self._step == self._read_answer

    @property
    def is_in_reasoning(self) -> bool:
        """Whether the text has begun reasoning, and not yet ended it."""
        return self._step == self._read_reasoning

    def feed(self, text: str, finished: bool) -> Pieces:
        """Add generated text. Returns the pieces that are certain; all of them once the text has `finished`."""
        return list(self._iter_pieces(text, finished))

    def _iter_pieces(self, text: str, finished: bool) -> Iterator[tuple[TextPart, str]]:
        text = self._held + text
        self._held = ""
        rest: str | None = text
        while rest is not None:
            pieces, rest = self._step(rest, finished)
            yield from (piece for piece in pieces if piece[1])

    def _read_start(self, text: str, finished: bool) -> tuple[Pieces, str | None]:
        """Read up to the first text that is not blank, which tells whether reasoning comes first."""
        visible = text.lstrip()
        self._blanks.append(text[: len(text) - len(visible)])
        marks = next((m for m in self._candidates if visible.startswith(m.begin)), None)
        if not marks and not finished and any(m.begin.startswith(visible) for m in self._candidates):
            self._held = visible
            return [], None
        blanks = "".join(self._blanks)
        self._blanks.clear()
        if marks:
            return self._begin_reasoning(blanks, marks, visible[len(marks.begin) :])
        self._step = self._read_answer
        return [], blanks + visible

    def _begin_reasoning(self, before: str, marks: ReasoningMarks, after: str) -> tuple[Pieces, str | None]:
        self.marks = marks
        self._step = self._read_reasoning
        return [(TextPart.MARK, before + marks.begin)], after

    def _read_reasoning(self, text: str, finished: bool) -> tuple[Pieces, str | None]:
        assert self.marks
        reasoning, mark, after = text.partition(self.marks.end)
        if mark:
            self._step = self._read_answer
            return [(TextPart.REASONING, reasoning), (TextPart.MARK, mark)], after
        return [(TextPart.REASONING, self._release(text, self.marks.end, finished))], None

    def _read_answer(self, text: str, finished: bool) -> tuple[Pieces, str | None]:
        marks = next((m for m in self._candidates if m.repeats), None)
        if not marks:
            return [(TextPart.ANSWER, text)], None
        answer, mark, after = text.partition(marks.begin)
        if mark:
            pieces, rest = self._begin_reasoning("", marks, after)
            return [(TextPart.ANSWER, answer), *pieces], rest
        return [(TextPart.ANSWER, self._release(text, marks.begin, finished))], None

    def _release(self, text: str, mark: str, finished: bool) -> str:
        """Return text without the end that may begin a mark, which is held back."""
        cut = len(text) - (0 if finished else partial_mark_length(text, mark))
        self._held = text[cut:]
        return text[:cut]


def partial_mark_length(text: str, mark: str) -> int:
    """Return the length of the longest end of the text that may begin the mark."""
    return next((n for n in range(min(len(mark) - 1, len(text)), 0, -1) if text.endswith(mark[:n])), 0)
