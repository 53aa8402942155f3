"""Bodies shaped like those of coding agents and SDKs (clients/responses/*.json), and a coding agent's turns.

A tiny model writes dictated answers, so that every kind of call can be asked for. SmolLM2 writes its own.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from retain.server.launch import GracefulServer
from tests.server.agent_model import AGENT_TEMPLATE, dictated_answers, save_agent_model
from tests.server.conftest import HTTP, chat_template_replaced, run_server
from tests.server.test_responses import recorded_prompts
from tests.server.test_tool_calls import HERMES

pytestmark = pytest.mark.slow

Json = dict[str, Any]
BODIES = {
    path.stem: json.loads(path.read_text("utf-8"))
    for path in sorted((Path(__file__).parent / "clients" / "responses").glob("*.json"))
}
WARNINGS = {
    "codex_first_turn": "tools left out: web_search",
    "codex_middle_turn": "tools left out: web_search; items left out: web_search_call, ghost_snapshot",
    "codex_compaction_turn": "items left out: web_search_call, ghost_snapshot",
    "codex_after_compaction": "tools left out: web_search; items left out: compaction",
    "codex_tool_search": "tools left out: web_search",
    "codex_prewarm": "tools left out: web_search",
    "langchain": "tools left out: web_search_preview, code_interpreter",
}


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments}, ensure_ascii=False)}</tool_call>"


PATCH = '*** Begin Patch\n*** Add File: a.py\n+print("é")\n*** End Patch\n'
ANSWERS: dict[str, tuple[str, list[str]]] = {  # what the model writes, and the types of the items that it becomes
    "codex_first_turn": (
        "<think>The ticket first.</think>I read it." + call("mcp__tickets__get_ticket", id=7),
        ["reasoning", "message", "function_call"],
    ),
    "codex_middle_turn": (
        call("apply_patch", input=PATCH) + call("exec_command", cmd="ls"),
        ["custom_tool_call", "function_call"],
    ),
    "codex_compaction_turn": ("total is sum(cart) now.", ["message"]),
    "codex_after_compaction": (call("tool_search", query="close"), ["tool_search_call"]),
    "codex_tool_search": (call("mcp__tickets__get_ticket", id=7), ["function_call"]),
    "openai_agents_shell": (
        call("shell", commands=["cat a.py"]) + call("apply_patch", type="delete_file", path="a.py"),
        ["shell_call", "apply_patch_call"],
    ),
    "codex_probe": ("a", ["message"]),
    "codex_prewarm": ("a", []),
    "openai_agents": (call("transfer_to_travel_agent"), ["function_call"]),
    "langchain": ("Paris.", ["message"]),
    "ai_sdk": ("<think>Two.</think>a.py and b.py.", ["reasoning", "message"]),
}


def connect(server: GracefulServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.url, api_key="none", max_retries=0)


def ask(server: GracefulServer, body: Json) -> tuple[Any, str | None]:
    """Return the response of a body as OpenAI's client reads it, streamed or not, and the header with warnings."""
    create = connect(server).responses.with_raw_response.create
    raw = create(model=body["model"], input=[], stream=bool(body.get("stream")), extra_body=body)
    answer, warning = raw.parse(), raw.headers.get("x-retain-warning")
    if not body.get("stream"):
        return answer, warning
    events = list(answer)
    assert events[0].type == "response.created" and events[-1].type in ("response.completed", "response.incomplete")
    assert [event.item for event in events if event.type == "response.output_item.done"] == events[-1].response.output
    return events[-1].response, warning


def without_ids(response: Any) -> list[Json]:
    items = [item.model_dump(exclude={"id", "call_id"}) for item in response.output]
    return json.loads(json.dumps(items))


@pytest.fixture(scope="module")
def agent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GracefulServer]:
    """A server of a tiny model that writes what a test dictates."""
    folder = save_agent_model(tmp_path_factory.mktemp("llama"), "llama")
    options = {"kv_memory": "128MiB", "dtype": "float32", "max_running_requests": 2}
    with run_server(str(folder), options, AGENT_TEMPLATE) as running:
        yield running


@pytest.mark.parametrize("client", BODIES)
def test_dictated_answers_become_items(agent: GracefulServer, client: str) -> None:
    text, kinds = ANSWERS[client]
    body = {**BODIES[client], "max_output_tokens": 1 if client == "codex_probe" else 400}
    if body.get("reasoning"):
        text = text.removeprefix("<think>")  # an effort lets the template open the reasoning
        text = text if "</think>" in text else f"</think>{text}"
    with dictated_answers(agent, [text, text]):
        full, warning = ask(agent, {**body, "stream": False})
        streamed, warning_of_stream = ask(agent, {**body, "stream": True})
    assert [item.type for item in full.output] == kinds and without_ids(full) == without_ids(streamed)
    assert warning == warning_of_stream == WARNINGS.get(client)
    assert full.usage.input_tokens > 0 and full.usage == streamed.usage.model_copy(
        update={"input_tokens_details": full.usage.input_tokens_details}
    )


@pytest.mark.parametrize("client", BODIES)
def test_an_answer_is_that_to_the_prompt(server: GracefulServer, client: str) -> None:
    body = {**BODIES[client], "temperature": 0, "max_output_tokens": min(BODIES[client].get("max_output_tokens", 8), 8)}
    with chat_template_replaced(server, HERMES):
        full, _ = ask(server, {**body, "stream": False})
        streamed, _ = ask(server, {**body, "stream": True})
        assert without_ids(full) == without_ids(streamed)
        prompt = HTTP.post(f"{server.url}/responses/render", json=body).json()["token_ids"]
        request = {"model": "smollm2", "prompt": prompt, "temperature": 0, "max_tokens": body["max_output_tokens"]}
        text = HTTP.post(f"{server.url}/completions", json=request).json()["choices"][0]["text"]
    assert full.usage.input_tokens == len(prompt)
    if client == "codex_prewarm":
        assert full.output == [] and full.status == "completed"
        assert streamed.usage.input_tokens_details.cached_tokens > len(prompt) - 64, "the prompt was computed"
    else:
        assert full.output_text == text


# ---- a coding agent's turns --------------------------------------------------------------------------------------

TURNS: list[tuple[str, list[str]]] = [  # what the model writes, and the outputs of its calls
    (
        "The ticket first.</think>I read it."
        + call("mcp__tickets__get_ticket", id=7)
        + call("local_shell", command=["ls"]),
        ["total of an empty cart", "cart.py"],
    ),
    ("Patch it.</think>" + call("apply_patch", input=PATCH), ["Success."]),
    ("Done.</think>I wrote a.py.", []),
    ("</think>You are welcome.", []),
]
OUTPUT_KINDS = {
    "function_call": "function_call_output",
    "custom_tool_call": "custom_tool_call_output",
    "local_shell_call": "local_shell_call_output",
}


def answer_calls(items: list[Any], outputs: list[str]) -> list[Json]:
    """Return what the client sends after a response: the outputs of its calls, or another question."""
    calls = [item for item in items if item.type in OUTPUT_KINDS]
    assert len(calls) == len(outputs)
    sent = [
        {"type": OUTPUT_KINDS[item.type], "call_id": item.call_id, "output": output}
        for item, output in zip(calls, outputs, strict=True)
    ]
    return sent or [{"type": "message", "role": "user", "content": "Thank you."}]


def send_as_codex(item: Any) -> Json:
    """Return an item as Codex CLI sends it: without ids, reasoning without its text."""
    sent = item.model_dump(exclude_none=True, exclude={"id", "status"} if item.type != "local_shell_call" else set())
    if item.type == "reasoning":
        sent["content"] = None
    return sent


def run_turns(server: GracefulServer, is_stored: bool) -> tuple[list[Any], list[list[int]]]:
    """Run the turns by items that the server stores, or that the client sends. Returns responses and prompts."""
    base = {**BODIES["codex_first_turn"], "max_output_tokens": 400, "cache_salt": str(is_stored)}
    base["tools"] = [*base["tools"], {"type": "local_shell"}]
    history, added = [], base["input"]
    responses: list[Any] = []
    with dictated_answers(server, [text for text, _ in TURNS]), recorded_prompts(server) as prompts:
        for _, outputs in TURNS:
            body = {**base, "input": [*history, *added]}
            if is_stored:
                body = {**base, "input": added, "store": True}
                body |= {"previous_response_id": responses[-1].id} if responses else {}
            response, _ = ask(server, body)
            responses.append(response)
            history += [*added, *map(send_as_codex, response.output)]
            added = answer_calls(response.output, outputs)
    return responses, prompts


def test_a_coding_turn_stored_or_sent_has_the_same_prompts(agent: GracefulServer) -> None:
    """After the first turn no token is computed twice, but for the last one, which was never an input."""
    stored, stored_prompts = run_turns(agent, is_stored=True)
    sent, sent_prompts = run_turns(agent, is_stored=False)
    assert stored_prompts == sent_prompts
    kinds = [[item.type for item in response.output] for response in sent]
    assert kinds == [
        ["reasoning", "message", "function_call", "local_shell_call"],
        ["reasoning", "custom_tool_call"],
        ["reasoning", "message"],
        ["message"],
    ]
    named, shell = sent[0].output[2:]
    assert (named.namespace, named.name, shell.action.command) == ("mcp__tickets", "get_ticket", ["ls"])
    assert sent[1].output[1].input == PATCH and sent[3].output_text == "You are welcome."
    for responses in (stored, sent):
        known = 0
        for response in responses:
            assert response.usage.input_tokens_details.cached_tokens == known
            known = response.usage.total_tokens - 1


def test_references_to_stored_items_have_the_same_prompt(agent: GracefulServer) -> None:
    first: Json = {"model": "smollm2", "input": "One", "max_output_tokens": 50}
    with dictated_answers(agent, ["Two", "Four", "Four"]), recorded_prompts(agent) as prompts:
        response, _ = ask(agent, first)
        (item,) = response.output
        asked = {"role": "user", "content": "Three"}
        reference = {"type": "item_reference", "id": item.id}
        ask(agent, {**first, "input": [{"role": "user", "content": "One"}, reference, asked]})
        ask(agent, {**first, "input": [{"role": "user", "content": "One"}, item.model_dump(), asked]})
    assert prompts[1] == prompts[2] and len(prompts[1]) > len(prompts[0])


@pytest.mark.parametrize(
    ("tool", "choice"),
    [
        ({"type": "custom", "name": "pick"}, {"type": "custom", "name": "pick"}),
        ({"type": "local_shell"}, {"type": "local_shell"}),
        ({"type": "namespace", "name": "ns", "tools": [{"type": "custom", "name": "pick"}]}, "required"),
    ],
)
def test_forced_calls_of_smollm2(quick_smollm2_server: GracefulServer, tool: Json, choice: Any) -> None:
    """A regex holds for the input of a custom tool."""
    custom = tool["tools"][0] if tool["type"] == "namespace" else tool
    if custom["type"] == "custom":
        custom = {**custom, "format": {"type": "grammar", "syntax": "regex", "definition": '(red|blue)"\\n[0-9]{2}'}}
    tool = {**tool, "tools": [custom]} if tool["type"] == "namespace" else custom
    body = {"model": "smollm2", "input": "Pick one.", "tools": [tool], "tool_choice": choice, "temperature": 0}
    with chat_template_replaced(quick_smollm2_server, HERMES):
        response, _ = ask(quick_smollm2_server, {**body, "max_output_tokens": 200})
    (item,) = response.output
    if custom["type"] == "custom":
        assert item.type == "custom_tool_call" and item.name == "pick"
        color, number = item.input.split('"\n')
        assert color in ("red", "blue") and len(number) == 2 and number.isdigit()
    else:
        assert item.type == "local_shell_call" and isinstance(item.action.command, list)
