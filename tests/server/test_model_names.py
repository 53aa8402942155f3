"""Names of the served model: several, or any."""

import pytest

from tests.server.conftest import HTTP, run_tiny_server

MESSAGES = [{"role": "user", "content": "x"}]
BODIES = {
    "/completions": {"prompt": "x", "max_tokens": 1},
    "/chat/completions": {"messages": MESSAGES, "max_tokens": 1},
    "/responses": {"input": "x", "max_output_tokens": 1},
    "/messages": {"messages": MESSAGES, "max_tokens": 1},
}
UNNAMED = {"/chat/completions/render": {"messages": MESSAGES}, "/messages/count_tokens": {"messages": MESSAGES}}
NAMES = ("main", "claude-sonnet-5", "openai/gpt-6")


@pytest.fixture(scope="module", params=[False, True], ids=["listed", "any"])
def named_server(request):
    with run_tiny_server(served_model_name=NAMES, any_model_name=request.param) as running:
        yield running


def ask(server, path, model):
    body = (BODIES | UNNAMED)[path]
    return HTTP.post(f"{server.url}{path}", json={"model": model, **body})


def test_every_name_is_listed(named_server):
    listed = HTTP.get(f"{named_server.url}/models").json()["data"]
    assert [card["id"] for card in listed] == [*NAMES]
    for card in listed:
        assert HTTP.get(f"{named_server.url}/models/{card['id']}").json() == card


@pytest.mark.parametrize("path", [*BODIES, *UNNAMED])
def test_answers_have_the_name_that_was_asked_for(named_server, path):
    is_any = named_server.service.any_model_name
    for name in NAMES:
        answer = ask(named_server, path, name)
        assert answer.status_code == 200 and (path in UNNAMED or answer.json()["model"] == name)
    other = ask(named_server, path, "other")
    assert other.status_code == (200 if is_any else 404)
    if path in BODIES:
        assert other.json()["model"] == "other" if is_any else other.json()["error"]["message"]
    assert HTTP.get(f"{named_server.url}/models/other").status_code == (200 if is_any else 404)


def test_openapi_has_the_names(named_server):
    schemas = HTTP.get(named_server.url.removesuffix("/v1") + "/openapi.json").json()["components"]["schemas"]
    names = schemas["ChatCompletionRequest"]["properties"]["model"].get("enum")
    assert names == (None if named_server.service.any_model_name else [*NAMES])
