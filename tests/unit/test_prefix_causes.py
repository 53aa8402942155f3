"""The likely cause of two prompts parting, on prompts of a real tokenizer and chat template."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from prefix_doctor.causes import Cause, find_tools
from prefix_doctor.explanations import EXPLANATIONS, decode_parting, explain
from retain.kv.prefix.start import MissReason, PrefixDiagnosis
from retain.processing.output import describe_prefix
from tests.helpers.tokenizers import open_tokenizer

TOOL = {"name": "find", "description": "find a lamp", "parameters": {"type": "object", "required": []}}
OTHER_TOOL = {"name": "buy", "parameters": {}}


def ids_of(prompt: str | list[dict[str, Any]] | list[int]) -> list[int]:
    """Return the tokens of a text, or of messages in SmolLM2's template."""
    tokenizer = open_tokenizer("smollm2")
    if isinstance(prompt, str):
        return tokenizer.encode(prompt)
    return tokenizer.encode_chat(prompt) if isinstance(prompt[0], dict) else list(prompt)  # type: ignore[arg-type]


def report_of(prompt: Any, nearest: Any) -> dict[str, Any]:
    ours, theirs = ids_of(prompt), ids_of(nearest)
    common = next(i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b)
    tokens = (np.array(x, np.int32) for x in (ours, theirs))
    found = PrefixDiagnosis(next(tokens), common, MissReason.DIVERGED, next(tokens), common, common)
    tokenizer = open_tokenizer("smollm2")
    return explain(describe_prefix(found, tokenizer), decode_parting(found, tokenizer))


def chat(*contents: str) -> list[dict[str, Any]]:
    roles = ["system", *["user", "assistant"] * 9]
    return [{"role": r, "content": c} for r, c in zip(roles, contents, strict=False) if c]


def tools(*definitions: Any) -> list[dict[str, Any]]:
    return chat("Tools:\n" + "\n".join(map(json.dumps, definitions)), "Hi")


OLD_TASKS, NEW_TASKS = (f"Be brief.\n# Tasks\n- [{mark}] read the files" for mark in " x")
HISTORY = ["Read all files of the folder, please.", "I have read them.", "Go on, and write about each of them."]
PAIRS: list[tuple[Cause, Any, Any]] = [
    (Cause.DATE_OR_ID, chat("It is 2026-01-27T10:31:07Z.", "Hi"), chat("It is 2026-01-27T10:31:09Z.", "Hi")),
    (Cause.DATE_OR_ID, chat("It is 10:31.", "Hi"), chat("It is 9:05.", "Hi")),
    (Cause.DATE_OR_ID, chat("Date: Jan 27, 2026", "Hi"), chat("Date: Feb 1, 2026", "Hi")),
    (Cause.DATE_OR_ID, chat("On 27.1.2026", "Hi"), chat("On 28.1.2026", "Hi")),
    (Cause.DATE_OR_ID, "now=1769510000 go", "now=1769510417 go"),
    (Cause.DATE_OR_ID, "request id: 41. Go", "request id: 7. Go"),
    (Cause.DATE_OR_ID, "trace req-8f3a9c go", "trace req-77b20d go"),
    (Cause.OTHER_TEXT, chat("Be brief.", "What is 12 + 13?"), chat("Be brief.", "What is 12 + 14?")),
    (Cause.OTHER_TEXT, chat("Be brief on 2026-01-27.", "Hi"), chat("Be brief on 2026-01-27.", "Hello")),
    (Cause.OTHER_TEXT, chat("You are kind.", "Hi"), chat("You were kind.", "Hi")),
    (Cause.OTHER_TEXT, chat("Be brief.", "Hi"), chat("Be brief.", "Hi there")),
    (Cause.SYSTEM_TAIL, chat(OLD_TASKS, *HISTORY), chat(NEW_TASKS, *HISTORY, "It is done.", "Thanks")),
    (Cause.OTHER_TEXT, chat(OLD_TASKS, "Hi"), chat(NEW_TASKS, *HISTORY)),
    (Cause.OTHER_TEXT, chat("Rules.", OLD_TASKS, *HISTORY), chat("Rules.", NEW_TASKS, *HISTORY)),
    (Cause.WHITE_SPACE, "a lamp and a chair", "a lamp  and a chair"),
    (Cause.WHITE_SPACE, "Rules:\n- one\n- two", "Rules:\r\n- one\r\n- two"),
    (Cause.WHITE_SPACE, "{\n  'a': 1}", "{\n    'a': 1}"),
    (Cause.TOOL_ORDER, tools(TOOL, OTHER_TOOL), tools(OTHER_TOOL, TOOL)),
    (Cause.TOOL_ORDER, tools(TOOL), tools(dict(reversed(TOOL.items())))),
    (Cause.TOOLS, tools(TOOL, OTHER_TOOL), tools(TOOL, TOOL | {"name": "sell"})),
    (Cause.OTHER_TEXT, [*tools(TOOL), *chat("", "Yes")], [*tools(TOOL), *chat("", "No")]),
    (Cause.TEMPLATE, chat("", "Hi"), chat("You are the clerk of a shop.", "Hi")),
    (Cause.TEMPLATE, chat("Rules.", "Hi"), [*chat("Rules."), {"role": "assistant", "content": "Hi"}]),
    (Cause.TEMPLATE, chat("Rules.", "Hi", "<think>Hm.</think>Yes", "So"), chat("Rules.", "Hi", "Yes", "So")),
    (Cause.TEMPLATE, "Rules.", chat("Rules.", "Hi")),
    (Cause.TOKENIZATION, "the inside of a word", "the inside of a wo"),
]


@pytest.mark.parametrize(("cause", "ours", "theirs"), PAIRS, ids=lambda x: x.value if isinstance(x, Cause) else "")
def test_causes_of_pairs_of_prompts(cause: Cause, ours: Any, theirs: Any) -> None:
    """Whichever of the two comes first."""
    assert report_of(ours, theirs)["cause"] == report_of(theirs, ours)["cause"] == cause.value


def test_the_same_text_as_other_tokens() -> None:
    """An answer may be sampled as other tokens than its text is encoded to."""
    tokenizer = open_tokenizer("smollm2")
    sampled = [t for letter in "a lamp" for t in tokenizer.encode(letter)]
    assert tokenizer.decode(sampled) == "a lamp"
    assert report_of(ids_of("a lamp and more"), sampled)["cause"] == "tokenization"


def test_every_cause_has_words() -> None:
    """A prompt that diverged has the cause of the texts."""
    assert EXPLANATIONS.keys() == {*MissReason, *Cause} - {MissReason.DIVERGED}


def test_the_explanation_quotes_nothing() -> None:
    found = report_of(chat("It is SECRET 10:31.", "SECRET"), chat("It is SECRET 10:42.", "SECRET"))
    assert "SECRET" in found["before"] and "SECRET" not in found["explanation"]


@pytest.mark.parametrize("text", ["{", "{{{{", '{"name": "x"', "{}", '{"a": [' * 3000, "{1}", '{"function": 3}'])
def test_braces_that_define_no_tool(text: str) -> None:
    assert find_tools(text) == []
