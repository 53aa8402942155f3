"""Bodies of requests as clients send them: each is answered, and rightly, whatever it says beside the question."""

import json
from pathlib import Path

import pytest

from tests.server.conftest import HTTP

FOLDER = Path(__file__).parent / "clients"
BODIES = sorted(FOLDER.glob("*.json"))
HONOURED = ["model", "prompt", "temperature", "stop", "ignore_eos", "min_tokens", "echo", "logprobs", "seed"]
HONOURED += ["top_k", "top_p", "min_p"]


def load(file):
    request = json.loads(file.read_text())
    return request["path"], request["body"]


def reduce(body):
    """Return the body with what changes the answer only, in the simplest form."""
    plain = {name: body[name] for name in HONOURED if body.get(name) is not None}
    limits = (body.get(name) for name in ("max_completion_tokens", "max_tokens", "n_predict"))
    plain["max_tokens"] = next(x for x in limits if x is not None)
    if "messages" in body:
        plain["messages"] = [{"role": m["role"], "content": flatten(m["content"])} for m in body["messages"]]
    return plain


def flatten(content):
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


def answer(server, path, body):
    """Return the text, the reason of the end and the usage of an answer."""
    response = HTTP.post(f"{server.url}{path}", json=body)
    assert response.status_code == 200, response.text
    if not body.get("stream"):
        (choice,) = response.json()["choices"]
        text = choice["text"] if "text" in choice else choice["message"]["content"]
        return text, choice["finish_reason"], response.json()["usage"]
    events = [json.loads(line[6:]) for line in response.text.split("\n") if line.startswith("data: {")]
    choices = [choice for event in events for choice in event["choices"]]
    text = "".join(c["text"] if "text" in c else c["delta"].get("content", "") for c in choices)
    return text, choices[-1]["finish_reason"], events[-1].get("usage")


def check(server, file):
    path, body = load(file)
    plain = answer(server, path, reduce(body))
    full = answer(server, path, {**body, "stream": False, "stream_options": None})
    streamed = answer(server, path, body | {"stream": True})
    assert full[:2] == streamed[:2] == plain[:2]
    if (body.get("stream_options") or {}).get("include_usage"):
        assert streamed[2]["completion_tokens"] == full[2]["completion_tokens"]
    return full[0]


@pytest.mark.parametrize("file", BODIES, ids=lambda file: file.stem)
def test_bodies_of_clients_are_answered(server, file):
    """What they say beside the question changes nothing in the answer."""
    check(server, file)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["litellm", "llama_cpp_text"])  # a chat and a text
def test_bodies_of_clients_get_right_answers(smollm2_server, name):
    assert "Paris" in check(smollm2_server, FOLDER / f"{name}.json")
