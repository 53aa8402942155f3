"""gpt-oss's channels: however an answer is cut, its parts are those of the whole; in every API; and what goes back."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from retain.processing.chat_template import ChatTemplate
from retain.processing.grammar import GrammarCompiler, grammar_from_lark
from retain.processing.tokenizer import Tokenizer
from retain.server.launch import GracefulServer
from retain.server.openai.chat_output import continue_answer
from retain.server.sandbox_worker import create_byte_tokenizer
from retain.server.tool_format import ChatOutput
from retain.server.tool_formats.harmony import MARKERS, Format, HarmonyParser
from tests.helpers.counted_work import assert_linear
from tests.helpers.folders import save_tiny_harmony
from tests.server.conftest import HTTP, run_server

PIECES = [*MARKERS, "analysis", "final", "commentary", " to=functions.f", " to=other", "<|", "|>", "{}", '{"a": 1}']
PIECES += ["assistant", "t", "o=", " ", "\n", "a b", "<", "json"]
TEMPLATE = (Path(__file__).parents[1] / "helpers/chat_templates/gpt_oss.jinja").read_text()
REASONING = "<|channel|>analysis<|message|>why<|end|>"
CALL = '<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}'
FINAL = "<|start|>assistant<|channel|>final<|message|>so"
MARKER_OR_TEXT = re.compile("|".join([*map(re.escape, MARKERS), "[^<]+"]))
SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}


def join(outputs: Sequence[ChatOutput]) -> tuple[str, str, list[tuple[str, str]]]:
    calls = [(call.name, call.arguments) for output in outputs for call in output.tool_calls]
    return "".join(o.reasoning for o in outputs), "".join(o.content for o in outputs), calls


def parse(pieces: Sequence[str], prompt: str = "<|start|>assistant") -> tuple[str, str, list[tuple[str, str]]]:
    parser = Format().create_parser({"f", "g"}, prompt)
    outputs = [parser.feed(piece, finished=False) for piece in pieces]
    return join([*outputs, parser.feed("", finished=True)])


@given(st.lists(st.sampled_from(PIECES), max_size=16))
def test_parts_do_not_depend_on_how_the_text_is_cut(pieces: list[str]) -> None:
    text = "".join(pieces)
    whole = join([HarmonyParser({"f", "g"}).feed(text, finished=True)])
    assert parse(pieces) == parse(list(text)) == parse([text]) == whole


@given(st.text("to=<|channel>message \n{}", max_size=30))
def test_an_answer_without_headers_is_content(text: str) -> None:
    if not any(marker in text for marker in MARKERS) and not text.lstrip().startswith("to="):
        assert parse([text]) == ("", text, [])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (REASONING + FINAL + "<|return|>", ("why", "so", [])),
        (REASONING + FINAL, ("why", "so", [])),
        (REASONING + CALL + "<|call|>", ("why", "", [("f", '{"a": 1}')])),
        (' to=functions.f<|channel|>commentary json<|message|>{"a": 1}<|call|>', ("", "", [("f", '{"a": 1}')])),
        ("<|channel|>commentary to=g<|message|><|call|>", ("", "", [("g", "{}")])),
        ("<|channel|>analysis to=functions.f code<|message|>{}", ("", "", [("f", "{}")])),
        ("<|channel|>commentary<|message|>I look.<|end|>" + CALL, ("", "I look.", [("f", '{"a": 1}')])),
        ("<|channel|>commentary<|message|>I look.<|end|>" + FINAL, ("", "I look.\n\nso", [])),
        (REASONING + "<|start|>assistant" + REASONING + FINAL, ("why\n\nwhy", "so", [])),
        (CALL + "<|call|>" + CALL, ("", "", [("f", '{"a": 1}')] * 2)),
        (REASONING + "\n" + FINAL + "<|end|>\n", ("why", "so", [])),
        ("<|channel|>analysis<|message|>why<|channel|>final<|message|>so", ("why", "so", [])),
        (CALL[:-1], ("", '{"a": 1', [])),
        ("<|channel|>commentary to=functions.unknown<|message|>{}<|call|>", ("", "{}", [])),
        ("<|channel|>commentary to=functions.f<|message|>[]<|call|>", ("", "[]", [])),
        ("<|channel|>analysis to=python code<|message|>1+1<|call|>", ("1+1", "", [])),
        ("<|channel|>anal", ("", "", [])),
        ("<|channel|>analysis<|message|>cut <|en", ("cut <|en", "", [])),
        ("<|channel|>final<|message|>a <|message|> b", ("", "a <|message|> b", [])),
    ],
)
def test_messages_go_where_their_headers_say(text: str, expected: tuple[str, str, list[tuple[str, str]]]) -> None:
    assert parse([text]) == expected


@pytest.mark.parametrize(("channel", "expected"), [("final", ("", " on", [])), ("analysis", (" on", "", []))])
def test_an_answer_continues_a_message_of_the_prompt(channel: str, expected: tuple[str, str, list[Any]]) -> None:
    before = f"<|start|>user<|message|>x<|end|><|start|>assistant<|channel|>{channel}<|message|>"
    parser = continue_answer(lambda: Format().create_parser((), before), "go")
    assert join([parser.feed(" on", finished=True)]) == expected


def render(messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]] = ()) -> str:
    fitted = [
        {**m, "thinking": m["reasoning_content"]} if "reasoning_content" in m else m
        for m in Format().fit_messages(messages)
    ]
    text = ChatTemplate(TEMPLATE, {}).render(fitted, True, Format().fit_tools(tools) or None)
    return text[text.index("<|start|>user") :]


def test_work_of_many_calls_and_results_is_linear() -> None:
    """Each result is found without a search for it, also where results come in another order."""

    def prepare(num_calls: int) -> Callable[[], object]:
        calls = [call_of("f", str(i)) for i in range(num_calls)]
        results = [{"role": "tool", "content": "x", "tool_call_id": str(i)} for i in reversed(range(num_calls))]

        def fit() -> None:
            fitted = Format().fit_messages([{"role": "assistant", "content": "", "tool_calls": calls}, *results])
            assert [m["tool_calls"][0]["id"] for m in fitted[::2]] == [m["tool_call_id"] for m in fitted[1::2]]

        return fit

    assert_linear(prepare, 500)


def call_of(name: str, id: str) -> dict[str, Any]:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": {"a": 1}}}


def test_each_call_goes_back_before_its_result_and_reasoning_before_the_first() -> None:
    messages = [
        {"role": "user", "content": "x"},
        {
            "role": "assistant",
            "content": "I look.",
            "reasoning_content": "why",
            "tool_calls": [call_of("f", "1"), call_of("g", "2")],
        },
        {"role": "tool", "content": "of g", "tool_call_id": "2"},
        {"role": "tool", "content": "of f", "tool_call_id": "1"},
        {"role": "user", "content": "y"},
    ]
    assert render(messages) == (
        "<|start|>user<|message|>x<|end|>"
        "<|start|>assistant<|channel|>analysis<|message|>why\n\nI look.<|end|>"
        '<|start|>assistant to=functions.f<|channel|>commentary json<|message|>{"a": 1}<|call|>'
        '<|start|>functions.f to=assistant<|channel|>commentary<|message|>"of f"<|end|>'
        '<|start|>assistant to=functions.g<|channel|>commentary json<|message|>{"a": 1}<|call|>'
        '<|start|>functions.g to=assistant<|channel|>commentary<|message|>"of g"<|end|>'
        "<|start|>user<|message|>y<|end|><|start|>assistant"
    )


def test_reasoning_of_finished_turns_is_dropped() -> None:
    answer = {"role": "assistant", "content": "so", "reasoning_content": "why"}
    text = render([{"role": "user", "content": "x"}, answer, {"role": "user", "content": "y"}])
    assert "why" not in text and "<|channel|>final<|message|>so<|end|>" in text


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny_harmony(tmp_path_factory.mktemp("tiny_harmony")))


@pytest.fixture(scope="module")
def tokenizer(folder: str) -> Tokenizer:
    return Tokenizer.open(Path(folder))


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer) -> GrammarCompiler:
    return GrammarCompiler(tokenizer, tokenizer.vocab_size)


def accepts(compiler: GrammarCompiler, grammar: str, text: str) -> bool:
    """Return whether a grammar allows the tokens of a text, and nothing after them."""
    state = compiler.compile(grammar_from_lark(grammar))
    for token in compiler.tokenizer.encode(text, add_special_tokens=False):
        if not state.accept_token(token):
            return False
    return state.is_complete


def test_a_grammar_allows_reasoning_and_one_call_of_a_tool(compiler: GrammarCompiler) -> None:
    grammar = Format().build_grammar([{"name": "f", "parameters": SCHEMA}, {"name": "g", "parameters": SCHEMA}])
    later = CALL.removeprefix("<|start|>assistant")
    before = ' to=functions.g<|channel|>commentary json<|message|>{"a": 2}'
    for text in (later, before, REASONING + CALL, REASONING + "<|start|>assistant" + before):
        assert accepts(compiler, grammar, text), text
        assert parse([text])[2]
    wrong = (later.replace("1", "3"), later.replace(".f", ".h"), FINAL, REASONING + REASONING, '{"a": 1}')
    assert not any(accepts(compiler, grammar, text) for text in wrong)


def test_a_grammar_of_content_is_of_the_final_channel(compiler: GrammarCompiler) -> None:
    grammar = Format().build_content_grammar(SCHEMA)
    final = '<|channel|>final<|message|>{"a": 2}'
    for text in (final, REASONING + "<|start|>assistant" + final):
        assert accepts(compiler, grammar, text) and parse([text])[1] == '{"a": 2}'
    assert not accepts(compiler, grammar, '{"a": 2}') and not accepts(compiler, grammar, REASONING)


def test_the_trial_of_a_grammar_knows_its_special_tokens() -> None:
    """One that it does not know would be an error, and what has an error passes untried."""
    from llguidance import LLMatcher

    for grammar in (Format().build_grammar([{"name": "f"}]), Format().build_content_grammar(SCHEMA)):
        assert LLMatcher(create_byte_tokenizer(()), grammar_from_lark(grammar), log_level=0).is_error()
        assert not LLMatcher(create_byte_tokenizer(MARKERS), grammar_from_lark(grammar), log_level=0).is_error()


@pytest.fixture(scope="module")
def harmony_server(folder: str) -> Iterator[GracefulServer]:
    with run_server(folder) as running:
        yield running


TOOL = {"name": "f", "description": "d", "parameters": SCHEMA}
BODIES: dict[str, dict[str, Any]] = {
    "chat/completions": {
        "messages": [{"role": "user", "content": "x"}],
        "tools": [{"type": "function", "function": TOOL}],
        "max_tokens": 99,
    },
    "responses": {"input": "x", "tools": [{"type": "function", **TOOL}], "max_output_tokens": 99},
    "messages": {
        "messages": [{"role": "user", "content": "x"}],
        "tools": [{"name": "f", "input_schema": SCHEMA}],
        "max_tokens": 99,
    },
}


def ask(server: GracefulServer, path: str, **fields: Any) -> tuple[str, str, list[tuple[str, dict[str, int]]]]:
    """Return reasoning, content and calls of an answer."""
    response = HTTP.post(f"{server.url}/{path}", json={"model": "smollm2", **BODIES[path], **fields})
    assert response.status_code == 200, response.text
    answer = response.json()
    if path == "chat/completions":
        message = answer["choices"][0]["message"]
        calls = [c["function"] for c in message.get("tool_calls") or ()]
        found = [(c["name"], json.loads(c["arguments"])) for c in calls]
        return message.get("reasoning_content") or "", message["content"] or "", found
    if path == "responses":
        items = {kind: [i for i in answer["output"] if i["type"] == kind] for kind in ("reasoning", "message")}
        texts = {kind: "".join(i["content"][0]["text"] for i in found) for kind, found in items.items()}
        calls = [i for i in answer["output"] if i["type"] == "function_call"]
        return texts["reasoning"], texts["message"], [(c["name"], json.loads(c["arguments"])) for c in calls]
    blocks = {kind: [b for b in answer["content"] if b["type"] == kind] for kind in ("thinking", "text", "tool_use")}
    texts = {kind: "".join(b[kind] for b in blocks[kind]) for kind in ("thinking", "text")}
    return texts["thinking"], texts["text"], [(b["name"], b["input"]) for b in blocks["tool_use"]]


def force_answer(server: GracefulServer, patch: pytest.MonkeyPatch, text: str) -> None:
    """Let the model write this, by a grammar that allows nothing else."""
    service = server.service
    prepare = service.prepare_chat_request
    parts = (part if part in MARKERS else json.dumps(part) for part in MARKER_OR_TEXT.findall(text))
    grammar = grammar_from_lark(f"start: {' '.join(parts)}")

    def prepare_forced(*arguments: Any) -> Any:
        prepared = prepare(*arguments)
        return prepared._replace(request=replace(prepared.request, grammar=grammar))

    patch.setattr(service, "prepare_chat_request", prepare_forced)


@pytest.mark.parametrize("path", BODIES)
def test_every_api_separates_an_answer(
    harmony_server: GracefulServer, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    with monkeypatch.context() as patch:
        force_answer(harmony_server, patch, REASONING + FINAL)
        assert ask(harmony_server, path) == ("why", "so", [])
    with monkeypatch.context() as patch:
        force_answer(harmony_server, patch, REASONING + CALL)
        assert ask(harmony_server, path) == ("why", "", [("f", {"a": 1})])
        response = HTTP.post(f"{harmony_server.url}/{path}", json={"model": "smollm2", **BODIES[path], "stream": True})
        assert "why" in response.text and "<|" not in response.text and "analysis" not in response.text


def test_tokens_before_the_final_text_are_those_of_reasoning(
    harmony_server: GracefulServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    force_answer(harmony_server, monkeypatch, REASONING + FINAL[:-1])  # with a text of one token
    body = {"model": "smollm2", **BODIES["responses"]}
    usage = HTTP.post(f"{harmony_server.url}/responses", json=body).json()["usage"]
    assert usage["output_tokens_details"]["reasoning_tokens"] == usage["output_tokens"] - 1


def test_a_demanded_call_comes_behind_its_header(harmony_server: GracefulServer) -> None:
    """The model of random weights would reason for ever, or write blanks: other tokens are made likely."""
    likely = harmony_server.service.llm.tokenizer.encode('<|end|>{"a":1}', add_special_tokens=False)
    bias = {str(token): 100 for token in likely}
    fields: dict[str, Any] = {"logit_bias": bias, "tool_choice": "required", "temperature": 0}
    _, content, calls = ask(harmony_server, "chat/completions", **fields)
    assert content == "" and calls in ([("f", {"a": 1})], [("f", {"a": 2})])
    fields |= {"tool_choice": "auto", "response_format": {"type": "json_schema", "json_schema": {"name": "s"}}}
    fields["response_format"]["json_schema"]["schema"] = SCHEMA
    _, content, calls = ask(harmony_server, "chat/completions", **fields)
    assert json.loads(content)["a"] in (1, 2) and not calls


def test_a_completion_shows_no_markers(harmony_server: GracefulServer) -> None:
    """Only answers of chats have them in their text, for the parser."""
    token = next(iter(harmony_server.service.llm.tokenizer.find_tokens(["<|channel|>"])))
    body = {"model": "smollm2", "prompt": "x", "max_tokens": 3, "logit_bias": {str(token): 100}}
    (choice,) = HTTP.post(f"{harmony_server.url}/completions", json=body).json()["choices"]
    assert choice["text"] == ""


def test_a_later_system_message_is_shown(harmony_server: GracefulServer) -> None:
    """The template drops system messages behind the first one without a word."""
    messages = [{"role": role, "content": f"{role}{i}"} for i, role in enumerate(("system", "user", "system"))]
    body = {"model": "smollm2", "messages": messages}
    ids = HTTP.post(f"{harmony_server.url}/chat/completions/render", json=body).json()["token_ids"]
    text = harmony_server.service.llm.tokenizer.decode(ids)
    assert all(message["content"] in text for message in messages)


def test_masks_allow_what_the_grammar_does(compiler: GrammarCompiler) -> None:
    """The first token of an answer with a call is a marker or a part of the recipient."""
    state = compiler.compile(grammar_from_lark(Format().build_grammar([TOOL])))
    allowed = set(np.flatnonzero(state.allowed_tokens()))
    assert compiler.tokenizer.find_tokens(["<|channel|>"]) <= allowed
    assert not compiler.tokenizer.find_tokens(["<|end|>", "<|message|>"]) & allowed
