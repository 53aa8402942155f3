"""Requests as Claude Code and other clients of Anthropic's API send them: a right answer for each, streamed or not.

`clients/messages/` has one request a file, with an answer for the tiny model to give and what a client gets of it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import anthropic
import pytest

from tests.server.agent_model import AGENT_TEMPLATE, dictated_answers, save_agent_model
from tests.server.conftest import HTTP, chat_template_replaced, run_server
from tests.server.test_tool_calls import HERMES

pytestmark = pytest.mark.slow

FOLDER = Path(__file__).parent / "clients" / "messages"
REQUESTS = {path.stem: json.loads(path.read_text()) for path in sorted(FOLDER.glob("*.json"))}
GENERATING = [name for name, request in REQUESTS.items() if "answer" in request]
NOT_COUNTED = ("max_tokens", "stream", "temperature", "top_p", "top_k", "stop_sequences", "metadata", "service_tier")
MODEL_FIELDS = {"model": "smollm2"}  # the name of the served model


@pytest.fixture(scope="module")
def agent_server(tmp_path_factory):
    """A tiny model that writes what a test dictates, with a context for the requests of agents."""
    folder = save_agent_model(tmp_path_factory.mktemp("agent"), "llama")
    options = {"kv_memory": "128MiB", "dtype": "float32", "max_running_requests": 2}
    with run_server(str(folder), options, AGENT_TEMPLATE) as running:
        yield running


def post(server, request: dict[str, Any], path: str | None = None, **fields: Any):
    url = server.url.removesuffix("/v1") + (path or request["path"])
    response = HTTP.post(url, json=request["body"] | MODEL_FIELDS | fields, headers=request["headers"])
    assert response.status_code == 200, response.text
    assert response.headers["request-id"].startswith("req_")
    return response


def read_stream(response) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return the events of a stream, and the message that they make."""
    lines = [line.removeprefix("data: ") for line in response.text.split("\n") if line.startswith("data: ")]
    events = [json.loads(line) for line in lines]
    snapshot: dict[str, Any] = {}
    for event in events:
        if event["type"] == "message_start":
            snapshot = event["message"]
        elif event["type"] == "content_block_start":
            snapshot["content"].append(event["content_block"] | {"json": ""})
        elif event["type"] == "content_block_delta":
            delta, block = event["delta"], snapshot["content"][event["index"]]
            for name in set(delta) - {"type"}:
                block_name = "json" if name == "partial_json" else name
                block[block_name] += delta[name]
        elif event["type"] == "content_block_stop":
            block = snapshot["content"][event["index"]]
            if text := block.pop("json"):
                block["input"] = json.loads(text)
        elif event["type"] == "message_delta":
            snapshot |= event["delta"] | {"usage": snapshot["usage"] | event["usage"]}
    return events, snapshot


def shown(message: dict[str, Any]) -> dict[str, Any]:
    """Return what is the same in every answer to a request."""
    content = [{k: v for k, v in block.items() if k not in ("id", "signature")} for block in message["content"]]
    return {"content": content, "stop_reason": message["stop_reason"]}


def num_prompt_tokens(message: dict[str, Any]) -> int:
    return sum(message["usage"][f"{kind}input_tokens"] for kind in ("", "cache_creation_", "cache_read_"))


@pytest.mark.parametrize("name", GENERATING)
def test_a_client_gets_the_answer(agent_server, name):
    request = REQUESTS[name]
    expected = dict(request["expected"])
    warning = expected.pop("warning")
    with dictated_answers(agent_server, [request["answer"]] * 2):
        full = post(agent_server, request, stream=False)
        streamed = post(agent_server, request, stream=True)
    assert [response.headers.get("x-retain-warning") for response in (full, streamed)] == [warning, warning]
    events, message = read_stream(streamed)
    assert shown(message) == shown(full.json())
    assert expected.items() <= shown(message).items()
    assert [event["type"] for event in events[:2]] == ["message_start", "ping"]
    assert num_prompt_tokens(message) == num_prompt_tokens(full.json()) == num_prompt_tokens(events[0]["message"])
    counted = {k: v for k, v in request["body"].items() if k not in NOT_COUNTED}
    count = post(agent_server, {**request, "body": counted}, "/v1/messages/count_tokens").json()
    assert count == {"input_tokens": num_prompt_tokens(message)}


@pytest.mark.parametrize("name", REQUESTS)
def test_the_prompt_has_what_the_client_sent(agent_server, name):
    renderer, request, prompts = agent_server.service.chat_renderer, REQUESTS[name], []
    render = renderer.render_prompt

    def record(body, key_name):
        prompts.append(render(body, key_name).prompt)
        return render(body, key_name)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(renderer, "render_prompt", record)
        post(agent_server, request, "/v1/messages/count_tokens")
    (prompt,) = prompts
    assert [text for text in request["prompt_has"] if text not in prompt] == []
    assert [text for text in request["prompt_lacks"] if text in prompt] == []


def test_the_client_library_reads_warned_streams(agent_server):
    """Anthropic's own client makes the same message of the stream, and finds the id of the request."""
    request = REQUESTS["claude_code_first_turn"]
    client = anthropic.Anthropic(base_url=agent_server.url.removesuffix("/v1"), api_key="none", max_retries=0)
    body = request["body"] | MODEL_FIELDS
    known = {name: body[name] for name in ("model", "max_tokens", "messages", "system", "tools", "thinking")}
    extra = {name: body[name] for name in body if name not in (*known, "stream")}
    with dictated_answers(agent_server, [request["answer"]]):
        with client.messages.stream(**known, extra_body=extra) as stream:
            message = stream.get_final_message()
        assert stream.response.headers["request-id"]
    assert [block.type for block in message.content] == ["thinking", "text", "tool_use"]
    assert message.usage.cache_creation_input_tokens or message.usage.cache_read_input_tokens


def answer_of_smollm2(server, name):
    """Return the answer whole, which is that of the stream, with a template that knows tools; its own knows none."""
    request = REQUESTS[name]
    with chat_template_replaced(server, HERMES):
        fields = {"temperature": 0, "max_tokens": min(request["body"]["max_tokens"], 60), "top_k": 1}
        full = post(server, request, stream=False, **fields).json()
        _, streamed = read_stream(post(server, request, stream=True, **fields))
    assert shown(streamed) == shown(full) and full["content"]
    text = "".join(block.get("text", "") for block in full["content"])
    assert request.get("smollm2_says", "Paris") in text
    return text


@pytest.mark.parametrize("name", [name for name in GENERATING if name != "claude_code_title"])
def test_smollm2_answers(quick_smollm2_server, name):
    answer_of_smollm2(quick_smollm2_server, name)


def test_smollm2_continues_an_object(smollm2_server):
    assert "title" in json.loads("{" + answer_of_smollm2(smollm2_server, "claude_code_title"))


STRICT = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('System message must be at the beginning.') }}{% endif %}"
    "<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
)


def test_system_messages_inside_of_a_conversation_fit_every_template(server):
    """A template that knows one at the start gets them as text of the user: Claude Code sends one in each request."""
    messages = [
        {"role": "user", "content": "What is the capital of France?"},
        {"role": "system", "content": "Agents: none."},
        {"role": "assistant", "content": "It is"},
    ]
    request = {
        "headers": {},
        "body": {"messages": messages, "system": "Be brief."},
        "path": "/v1/messages/count_tokens",
    }
    encode = server.service.llm.tokenizer.encode
    joined = (
        "<|system|>Be brief.<|end|><|user|>What is the capital of France?\n\nAgents: none.<|end|><|assistant|>It is"
    )
    with chat_template_replaced(server, STRICT):
        count = post(server, request).json()["input_tokens"]
        answer = post(server, request, "/v1/messages", max_tokens=2, temperature=0).json()
    assert count == len(encode(joined, add_special_tokens=False)) == num_prompt_tokens(answer)
