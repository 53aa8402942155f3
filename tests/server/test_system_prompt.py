"""Policies with protect=system keep the system prompt of a conversation, whoever names the policy."""

from __future__ import annotations

import httpx
import pytest

from retain.server.auth import ApiKey
from retain.server.launch import GracefulServer
from retain.server.openai.chat_protocol import ChatCompletionRequest
from tests.server.conftest import HTTP, run_tiny_server

PROTECTING = "h2o:budget=64,protect=system"
MESSAGES = [{"role": "system", "content": "Be brief. " * 20}, {"role": "user", "content": "Hello"}]


def build_body(kv_policy: str | None) -> ChatCompletionRequest:
    return ChatCompletionRequest.model_validate({"model": "smollm2", "messages": MESSAGES, "kv_policy": kv_policy})


@pytest.mark.parametrize(
    ("engine_policy", "kv_policy", "expected"),
    [(PROTECTING, None, True), (PROTECTING, "full", False), ("full", PROTECTING, True), ("full", None, False)],
)
def test_system_tokens_are_counted_for_the_policy_that_applies(
    engine_policy: str, kv_policy: str | None, expected: bool
) -> None:
    with run_tiny_server(engine_options={"kv_policy": engine_policy}) as server:
        (request,) = server.service.prepare_chat(build_body(kv_policy), ApiKey("", "")).requests
        (state,) = server.service.process([request])
    assert (request.num_system_tokens > 200) == expected
    assert getattr(state.request.policy, "sinks", 0) == request.num_system_tokens


@pytest.mark.parametrize("route", ["chat/completions", "completions", "messages", "responses"])
def test_a_policy_that_the_cache_has_no_room_for_is_refused_in_words(route: str, tiny_server: GracefulServer) -> None:
    prompts = {
        "chat/completions": {"messages": MESSAGES[1:]},
        "completions": {"prompt": "Hello"},
        "messages": {"messages": MESSAGES[1:], "max_tokens": 8},
        "responses": {"input": "Hello"},
    }
    body = {"model": "smollm2", "kv_policy": "h2o:budget=4,demote=int4", **prompts[route]}
    response: httpx.Response = HTTP.post(f"{tiny_server.url}/{route}", json=body)
    assert response.status_code == 400 and "demotes tokens" in response.json()["error"]["message"]
