"""System messages that a chat template refuses: several at the start become one, later ones text of the user."""

from __future__ import annotations

from typing import Any

import pytest

from retain.server.launch import GracefulServer
from retain.server.openai.messages import join_system_messages
from tests.server.conftest import HTTP, chat_template_replaced

ONE_SYSTEM_MESSAGE = (
    "{% for m in messages %}"
    "{% if m.role == 'system' and not loop.first %}{{ raise_exception('only at the start') }}{% endif %}"
    "{% if not loop.first and m.role == loop.previtem.role %}{{ raise_exception('roles alternate') }}{% endif %}"
    "[{{ m.role }}]{{ m.content }}{% endfor %}"
)
SYSTEM, LATER = ({"role": "system", "content": text} for text in ("s", "t"))
USER, ANSWER = {"role": "user", "content": "u"}, {"role": "assistant", "content": "a"}


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        ([SYSTEM, USER], "system:s user:u"),
        ([SYSTEM, LATER, USER], "system:s+t user:u"),
        ([SYSTEM, USER, LATER], "system:s user:u+t"),
        ([USER, LATER, LATER, USER], "user:u+t+t+u"),
        ([USER, ANSWER, LATER, USER], "user:u assistant:a user:t+u"),
        ([USER, ANSWER, LATER, ANSWER], "user:u assistant:a user:t assistant:a"),
        ([USER, USER], "user:u user:u"),
    ],
)
def test_only_the_first_message_is_of_the_system(messages: list[dict[str, Any]], expected: str) -> None:
    joined = join_system_messages(messages)
    assert " ".join(f"{m['role']}:{m['content']}".replace("\n\n", "+") for m in joined) == expected
    assert all(set(m) == {"role", "content"} for m in joined)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("chat/completions", {"messages": [SYSTEM, {**LATER, "role": "developer"}, USER, LATER]}),
        ("responses", {"instructions": "s", "input": [{**LATER, "role": "developer"}, USER, LATER]}),
        ("messages", {"system": "s", "max_tokens": 1, "messages": [USER, LATER, USER]}),
    ],
)
def test_every_api_answers_where_the_template_has_one_system_message(
    tiny_server: GracefulServer, path: str, body: dict[str, Any]
) -> None:
    limit = {"responses": {"max_output_tokens": 1}}.get(path, {"max_tokens": 1})
    with chat_template_replaced(tiny_server, ONE_SYSTEM_MESSAGE):
        answer = HTTP.post(f"{tiny_server.url}/{path}", json={"model": "smollm2", **limit, **body})
    assert answer.status_code == 200, answer.text
