"""What clients and model files may send costs bounded time and memory, and stops nobody else's requests."""

from __future__ import annotations

import json
import signal
import threading
from contextlib import ExitStack
from typing import Any

import orjson
import pytest
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, TypeAdapter

from retain.processing.chat_template import ChatTemplate
from retain.processing.grammar import grammar_from_json_schema
from retain.server import drain
from retain.server.admission import AdmissionControl
from retain.server.auth import ApiKeys
from retain.server.config import Limits
from retain.server.openai.body import MAX_ITEMS, MAX_KEYS, MAX_VALUES, parse_body
from retain.server.openai.chat_protocol import ChatCompletionRequest
from retain.server.openai.errors import APIError
from retain.server.openai.protocol import CompletionRequest
from retain.server.openai.tokenization import DetokenizeRequest
from retain.server.sandbox import Sandbox
from tests.server.conftest import HTTP, engine_paused, run_server, run_tiny_server, wait_until

pytestmark = pytest.mark.slow

NO_MESSAGES = {"messages": [], "add_generation_prompt": True, "tools": None, "variables": {}}
LOOP = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"


def ref_chain(length: int) -> dict[str, Any]:
    """A schema of arrays in arrays, that nests only through its references."""
    definitions: dict[str, Any] = {
        f"d{i}": {"type": "array", "items": {"$ref": f"#/$defs/d{i + 1}"}} for i in range(length)
    }
    return {"$defs": {**definitions, f"d{length}": {"type": "string"}}, "$ref": "#/$defs/d0"}


SLOW_SCHEMA = {"type": "string", "allOf": [{"pattern": f".*{c}.{{5}}x"} for c in "abcdefghijklmnopqrst"]}


@pytest.fixture(scope="module")
def sandbox():
    with ExitStack() as stack:
        sandbox = Sandbox(1.0)
        stack.callback(sandbox.close)
        yield sandbox


# ---- grammars and templates ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("schema", "message"), [(ref_chain(3000), "nests too deeply"), (SLOW_SCHEMA, "takes longer than 1 s")]
)
def test_grammar_that_would_end_or_stop_the_server_is_refused(sandbox, schema, message):
    with pytest.raises(ValueError, match=message):
        sandbox.check_grammar(grammar_from_json_schema(schema))
    sandbox.check_grammar(grammar_from_json_schema({"type": "object"}))  # another worker is ready


@pytest.mark.parametrize(
    "source",
    [
        LOOP,
        "{{ 'a' * 6000000000 }}",
        "{{ 'a' * (6000000000 - messages | length) }}",
        "{{ '%999999999d' % 1 }}",
        "{{ '%*d' % (999999999, 1) }}",
        "{{ 'a'.ljust(6000000000) }}",
        "{{ strftime_now('%Y' * 100000000) }}",
        "{{ strftime_now('%Y' * 1000) }}",
        "{{ 9 ** 9 ** 9 }}",
    ],
)
def test_template_that_would_stop_the_server_is_refused(sandbox, source):
    with pytest.raises(ValueError) as error:
        sandbox.render(source, {}, **NO_MESSAGES)
    assert "\n" not in str(error.value)


def test_template_in_a_sandbox_renders_as_elsewhere(sandbox):
    source = "{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }} 50% {{ '%02d' % 7 }}{% endfor %}"
    messages = [{"role": "user", "content": "ä\n😀"}]
    rendered = ChatTemplate(source, {"bos_token": "<s>"}).render(messages, True)
    assert sandbox.render(source, {"bos_token": "<s>"}, **NO_MESSAGES | {"messages": messages}) == rendered


def test_template_that_loops_stops_neither_other_requests_nor_the_shutdown():
    limits = Limits(sandbox_timeout=2.0)
    with run_server("random:tiny", {"kv_memory": "64MiB", "dtype": "float32"}, LOOP, limits=limits) as server:
        statuses: list[int] = []

        def chat() -> None:
            body = {"model": "smollm2", "messages": [{"role": "user", "content": "x"}]}
            statuses.append(HTTP.post(f"{server.url}/chat/completions", json=body).status_code)

        thread = threading.Thread(target=chat)
        thread.start()
        wait_until(lambda: server.service.admission.num_in_flight)
        body = {"model": "smollm2", "prompt": "x", "max_tokens": 2}
        assert HTTP.post(f"{server.url}/completions", json=body).status_code == 200
        assert not statuses  # the answer came while the template was running
        thread.join(30)
        assert statuses == [400]


def test_schema_that_nests_by_references_gets_a_400(tiny_server):
    def post(schema: dict[str, Any]) -> int:
        response_format = {"type": "json_schema", "json_schema": {"schema": schema}}
        messages = [{"role": "user", "content": "x"}]
        body = {"model": "smollm2", "messages": messages, "response_format": response_format, "max_tokens": 2}
        return HTTP.post(f"{tiny_server.url}/chat/completions", json=body).status_code

    assert post(ref_chain(3000)) == 400
    assert post(ref_chain(3)) == 200


# ---- bodies ----------------------------------------------------------------------------------------------------------

COMPLETION = {"model": "m", "prompt": "x"}
EXCESSIVE: list[tuple[type[BaseModel], dict[str, Any]]] = [
    (CompletionRequest, {**COMPLETION, "prompt": [""] * (MAX_ITEMS + 1)}),
    (CompletionRequest, {**COMPLETION, "prompt": [""] * MAX_ITEMS}),
    (CompletionRequest, {**COMPLETION, "prompt": [[-1] * 60] * MAX_ITEMS}),
    (CompletionRequest, {**COMPLETION, "prompt": [[0] * 1000] * 1100}),
    (CompletionRequest, {**COMPLETION, "logit_bias": {f"x{i}": 1 for i in range(400_000)}}),
    (CompletionRequest, {**COMPLETION, **{f"x{i}": 1 for i in range(MAX_KEYS + 1)}}),
    (DetokenizeRequest, {"tokens": [-1] * MAX_VALUES}),
    (ChatCompletionRequest, {"model": "m", "messages": [{}] * MAX_ITEMS}),
]


@pytest.mark.parametrize(("model", "body"), EXCESSIVE, ids=range(len(EXCESSIVE)))
def test_excessive_body_gives_one_error(model: type[BaseModel], body: dict[str, Any]) -> None:
    with pytest.raises(RequestValidationError) as error:
        parse_body(orjson.dumps(body), TypeAdapter(model))
    assert len(error.value.errors()) == 1
    assert len(str(error.value.errors())) < 1000


def test_longest_prompts_are_accepted() -> None:
    body = {**COMPLETION, "prompt": [7] * (MAX_VALUES - 100)}
    assert parse_body(orjson.dumps(body), TypeAdapter(CompletionRequest)).prompts == [body["prompt"]]


def test_lone_surrogate_gets_a_400(tiny_server):
    body = json.dumps({"model": "smollm2", "prompt": "x", "user": "\ud800"})
    response = HTTP.post(f"{tiny_server.url}/completions", content=body, headers={"Content-Type": "application/json"})
    assert response.status_code == 400


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize"])
def test_tokenization_passes_the_gate(path: str) -> None:
    body = {"prompt": "x"} if path == "/tokenize" else {"tokens": [1]}
    with run_tiny_server() as server:
        url = server.url.removesuffix("/v1") + path
        assert HTTP.post(url, json=body).status_code == 200
        if path == "/tokenize":
            assert HTTP.post(url, json={"prompt": "x" * 1_000_000}).status_code == 400
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(server.service.admission, "max_in_flight", 0)
            assert HTTP.post(url, json=body).status_code == 429


# ---- shares of keys --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_busy_keys", [1, 2, 5])
def test_busy_keys_leave_room_for_another(num_busy_keys: int) -> None:
    admission = AdmissionControl(Limits(max_queued_requests=256), 32, num_keys=num_busy_keys + 1)
    with ExitStack() as admitted:
        for key in map(str, range(num_busy_keys)):
            with pytest.raises(APIError) as error:
                for _ in range(24):
                    admitted.enter_context(admission.open(key)).admit(16)
            assert error.value.status == 429
        for _ in range(2):
            admitted.enter_context(admission.open("new")).admit(4)


def test_one_key_alone_has_all_the_room() -> None:
    admission = AdmissionControl(Limits(max_queued_requests=30), 2, num_keys=len(ApiKeys({"ann": "sk-0123456789"})))
    with ExitStack() as admitted:
        for _ in range(2):
            admitted.enter_context(admission.open("ann")).admit(16)
        with pytest.raises(APIError):
            admitted.enter_context(admission.open("ann")).admit(1)


def test_process_ends_although_its_shutdown_hangs(monkeypatch):
    exit_codes: list[int] = []
    monkeypatch.setattr(drain, "EXIT_GRACE_S", 0.2)
    monkeypatch.setattr(drain.os, "_exit", exit_codes.append)
    with run_tiny_server(drain_timeout=0) as server, engine_paused(server):
        server.handle_exit(signal.SIGTERM, None)
        wait_until(lambda: exit_codes)
    assert exit_codes == [1]
