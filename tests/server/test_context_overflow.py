"""What does not fit: prompts that are too long are refused in the words that agents look for, answers are cut."""

import json
import re

import pytest

from retain.server.config import Limits
from tests.server.conftest import HTTP, run_tiny_server

CONTEXT = 200
PATTERNS = {
    "messages": r"prompt is too long: (\d+) tokens > (\d+) maximum",
    "others": r"maximum context length is (?P<context>\d+) tokens.* (?P<tokens>\d+) tokens.*reduce the length of the",
}
LIMIT_FIELDS = {"responses": "max_output_tokens"}


@pytest.fixture(scope="module")
def short_server():
    with run_tiny_server(engine_options={"max_model_len": CONTEXT}) as running:
        yield running


@pytest.fixture(scope="module")
def small_pool_server():
    """A server whose pool holds less than its context, and that limits answers."""
    options = {"max_model_len": 2048, "kv_memory": "512KiB"}
    with run_tiny_server(engine_options=options, limits=Limits(max_output_tokens=4)) as running:
        yield running


def build_body(api, text, max_tokens=1, **fields):
    """Build a request whose prompt ends with this text. A character is a token."""
    prompt = {
        "completions": {"prompt": text},
        "responses": {"input": text},
    }.get(api, {"messages": [{"role": "user", "content": text}]})
    return {"model": "smollm2", LIMIT_FIELDS.get(api, "max_tokens"): max_tokens, **prompt, **fields}


def post(server, api, body):
    return HTTP.post(f"{server.url}/{'chat/completions' if api == 'chat' else api}", json=body)


def count_prompt_tokens(api, answer):
    usage = answer.json()["usage"]
    cached = usage.get("cache_read_input_tokens", 0) + usage.get("cache_creation_input_tokens", 0)
    return usage.get("prompt_tokens") or usage["input_tokens"] + (cached if api == "messages" else 0)


def read_overflow(api, answer):
    """Return the prompt's tokens and the context that an error names, after checking what else agents look at."""
    if answer.headers["content-type"].startswith("text/event-stream"):  # where Codex CLI looks for it
        *_, failed = (json.loads(line[6:]) for line in answer.text.split("\n") if line.startswith("data: {"))
        error = failed["response"]["error"]
        assert failed["type"] == "response.failed" and error["code"] == "context_length_exceeded"
        found = re.search(PATTERNS["others"], error["message"])
        return int(found["tokens"]), int(found["context"])
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["type"] == "invalid_request_error" and "\n" not in error["message"]
    if api == "messages":
        tokens, maximum = map(int, re.search(PATTERNS[api], error["message"]).groups())
        return tokens, maximum + 1
    prompt_field = {"completions": "prompt", "responses": "input"}.get(api, "messages")
    assert (error["code"], error["param"]) == ("context_length_exceeded", prompt_field)
    found = re.search(PATTERNS["others"], error["message"])
    return int(found["tokens"]), int(found["context"])


APIS = ["chat", "completions", "responses", "messages"]


@pytest.mark.slow
@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("stream", [False, True])
def test_the_longest_prompt_leaves_one_token_and_the_next_is_refused(short_server, api, stream):
    overhead = count_prompt_tokens(api, post(short_server, api, build_body(api, "x"))) - 1
    fitting = "x" * (CONTEXT - overhead - 1)
    answer = post(short_server, api, build_body(api, fitting, max_tokens=1000))
    assert answer.status_code == 200 and count_prompt_tokens(api, answer) == CONTEXT - 1
    refused = post(short_server, api, build_body(api, fitting + "x", stream=stream))
    assert read_overflow(api, refused) == (CONTEXT, CONTEXT)


@pytest.mark.parametrize("api", APIS)
def test_a_text_that_is_not_even_tokenized_is_refused_in_the_same_words(short_server, api):
    tokens, context = read_overflow(api, post(short_server, api, build_body(api, "x" * 50_000)))
    assert context == CONTEXT < tokens <= 50_100


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("fields", [{}, {"kv_policy": "ring:window=1500"}])
def test_the_context_of_a_small_pool_is_what_it_holds(small_pool_server, api, fields):
    refused = post(small_pool_server, api, build_body(api, "x" * 1200, **fields))
    tokens, context = read_overflow(api, refused)
    assert tokens >= 1200 > context
    fitting = "x" * (1200 - tokens + context - 1)
    assert post(small_pool_server, api, build_body(api, fitting, **fields)).status_code == 200
    assert read_overflow(api, post(small_pool_server, api, build_body(api, fitting + "x", **fields)))[1] == context


def read_end(api, answer):
    """Return why a full answer ended, and how many tokens it has."""
    body, usage = answer.json(), answer.json()["usage"]
    reason = {
        "messages": lambda: body["stop_reason"],
        "responses": lambda: body["incomplete_details"]["reason"],
    }.get(api, lambda: body["choices"][0]["finish_reason"])()
    return reason, usage.get("completion_tokens") or usage["output_tokens"]


def read_stream_end(api, answer):
    """Return why a streamed answer ended."""
    events = [json.loads(line[6:]) for line in answer.text.split("\n") if line.startswith("data: {")]
    return {
        "messages": lambda: next(e["delta"]["stop_reason"] for e in events if e["type"] == "message_delta"),
        "responses": lambda: events[-1]["response"]["incomplete_details"]["reason"],
    }.get(api, lambda: next(r for e in events for c in e["choices"] if (r := c["finish_reason"])))()


@pytest.mark.parametrize("api", APIS)
def test_max_tokens_is_cut_to_what_the_context_leaves(short_server, api):
    """And the answer says that it ended for its length."""
    body = build_body(api, "Hello", max_tokens=10**6, ignore_eos=True)
    answer = post(short_server, api, body)
    reason, num_output = read_end(api, answer)
    expected = {"messages": "model_context_window_exceeded", "responses": "max_output_tokens"}
    assert reason == expected.get(api, "length") and count_prompt_tokens(api, answer) + num_output == CONTEXT
    assert read_stream_end(api, post(short_server, api, body | {"stream": True})) == reason


@pytest.mark.parametrize("api", APIS)
def test_max_tokens_is_cut_to_the_limit_of_the_server(small_pool_server, api):
    for max_tokens in (5, 10**6):
        body = build_body(api, "Hello", max_tokens=max_tokens, ignore_eos=True)
        expected = {"messages": "max_tokens", "responses": "max_output_tokens"}
        assert read_end(api, post(small_pool_server, api, body)) == (expected.get(api, "length"), 4)


@pytest.mark.parametrize("path", ["completions/render", "responses/render", "chat/completions/render", "../tokenize"])
def test_a_prompt_that_is_only_rendered_is_refused_in_the_same_words(short_server, path):
    body = build_body(path.partition("/")[0], "x" * 10**6)
    if path == "../tokenize":
        body = {"prompt": "x" * 10**6}
    answer = HTTP.post(f"{short_server.url}/{path}", json=body)
    field = {"completions/render": "prompt", "responses/render": "input", "../tokenize": "prompt"}.get(path, "messages")
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["param"] == field and f"your {field} resulted" in error["message"]
    assert error["code"] == "context_length_exceeded"
