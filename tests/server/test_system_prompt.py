"""Policies with protect=system keep the system prompt of a conversation, whoever names the policy."""

from __future__ import annotations

from collections import Counter
from typing import Any

import httpx
import pytest

from retain.server.auth import ApiKey
from retain.server.launch import GracefulServer
from retain.server.openai import chat_renderer
from retain.server.openai.chat_protocol import ChatCompletionRequest
from tests.server.conftest import HTTP, run_tiny_server

PROTECTING = "h2o:budget=64,protect=system"
MESSAGES = [{"role": "system", "content": "Be brief. " * 20}, {"role": "user", "content": "Hello"}]

CONVERSATIONS = {
    "chat/completions": {"messages": MESSAGES, "max_tokens": 8},
    "messages": {"system": "Be brief.", "messages": MESSAGES[1:], "max_tokens": 8},
    "responses": {"instructions": "Be brief.", "input": "Hello", "max_output_tokens": 8},
}


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


@pytest.mark.parametrize(("route", "prompt"), CONVERSATIONS.items())
def test_a_conversation_is_converted_and_rendered_once(
    route: str, prompt: dict[str, Any], tiny_server: GracefulServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the policy keeps the system prompt: its tokens are counted from the same messages."""
    convert, render = chat_renderer.to_template_messages, chat_renderer.render_prompt
    calls: Counter[str] = Counter()
    monkeypatch.setattr(chat_renderer, "to_template_messages", lambda *x: (calls.update(["convert"]), convert(*x))[1])
    monkeypatch.setattr(chat_renderer, "render_prompt", lambda *x: (calls.update(["render"]), render(*x))[1])
    body = {"model": "smollm2", "kv_policy": PROTECTING, **prompt}
    assert HTTP.post(f"{tiny_server.url}/{route}", json=body).status_code == 200
    assert calls == {"convert": 1, "render": 1}


@pytest.mark.parametrize("route", ["chat/completions", "completions", "messages", "responses"])
def test_a_policy_that_the_cache_has_no_room_for_is_refused_in_words(route: str, tiny_server: GracefulServer) -> None:
    prompt = CONVERSATIONS.get(route, {"prompt": "Hello"})
    body = {"model": "smollm2", "kv_policy": "h2o:budget=4,demote=int4", **prompt}
    response: httpx.Response = HTTP.post(f"{tiny_server.url}/{route}", json=body)
    assert response.status_code == 400 and "demotes tokens" in response.json()["error"]["message"]
