"""Policies that cost more than a request may choose, over HTTP: refused, unless the operator allows them."""

from collections.abc import Iterator

import pytest

from retain.server.launch import GracefulServer
from tests.server.conftest import HTTP, run_tiny_server

ALLOWED = "h2o:budget=1,prefill=stream,chunk=1", "sinks:budget=9,interval=1"
PROMPTS = {
    "chat/completions": {"messages": [{"role": "user", "content": "Hello"}]},
    "chat/completions/render": {"messages": [{"role": "user", "content": "Hello"}]},
    "completions": {"prompt": ["Hello", "you"]},
    "messages": {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4},
    "responses": {"input": "Hello"},
}


@pytest.fixture(scope="module")
def allowing_server() -> Iterator[GracefulServer]:
    """A server that allows what costs too much for others."""
    with run_tiny_server(engine_options={"allow_policy": ALLOWED}) as server:
        yield server


def ask(server: GracefulServer, route: str, policy: str) -> tuple[int, str]:
    """Return status and text of the answer to a request with a policy."""
    body = {"model": "smollm2", "kv_policy": policy, **PROMPTS[route]}
    limit = {"max_output_tokens": 4} if route == "responses" else {"max_tokens": 4}
    response = HTTP.post(f"{server.url}/{route}", json=body | limit)
    return response.status_code, response.text


@pytest.mark.parametrize("route", PROMPTS)
@pytest.mark.parametrize("policy", ALLOWED)
def test_a_policy_that_costs_too_much_needs_the_operator(policy, route, tiny_server, allowing_server):
    status, text = ask(tiny_server, route, policy)
    assert status == 400 and "--allow-policy" in text and "every 1 tokens" in text
    assert ask(allowing_server, route, policy)[0] == 200
    assert ask(allowing_server, route, f"{policy},recent=1")[0] == 400
