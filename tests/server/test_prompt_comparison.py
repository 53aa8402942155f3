"""`diagnostics` of messages and `prompt_cache_diagnostics` of responses: what changed since an earlier answer."""

import json
from dataclasses import replace

import anthropic
import numpy as np
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from retain.kv.text import common_prefix_length, hash_blocks
from retain.server.openai.prompt_comparison import (
    BLOCK_SIZE,
    PromptChange,
    PromptComparison,
    PromptFingerprint,
    PromptFingerprints,
    compare,
)
from tests.server.agent_model import AGENT_TEMPLATE
from tests.server.conftest import API_KEYS, HTTP, run_in_engine_thread, run_server

SYSTEM = "You look after a lamp that nobody can put out, and answer those who come to see it. "
QUESTION = "How long has the lamp been burning, and who was it that lit it in the first place? "
TOOLS = [{"name": name, "input_schema": {"type": "object", "properties": {}}} for name in ("look", "listen")]
FUNCTIONS = [{"type": "function", "name": t["name"], "parameters": t["input_schema"]} for t in TOOLS]
MESSAGE = {"model": "smollm2", "max_tokens": 2, "temperature": 0, "system": SYSTEM, "tools": TOOLS}
MESSAGE |= {"messages": [{"role": "user", "content": QUESTION}]}
RESPONSE = {"model": "smollm2", "max_output_tokens": 2, "temperature": 0, "store": False}
RESPONSE |= {"instructions": SYSTEM, "tools": FUNCTIONS, "input": [{"role": "user", "content": QUESTION}]}
MORE = [{"role": "assistant", "content": "Long."}, {"role": "user", "content": "Who lit it? " * 4}]


@pytest.fixture(scope="module")
def lamp_server():
    options = {"kv_memory": "64MiB", "dtype": "float32"}
    with run_server("random:tiny", options, AGENT_TEMPLATE) as running:
        yield running


def send(server, path, body, **headers):
    response = HTTP.post(f"{server.url}/{path}", json=body, headers=headers)
    assert response.status_code == 200, response.text
    return response


def diagnose_message(server, changes, previous_id=None):
    """Return the diagnostics of a message, as Anthropic's types read them, and its whole answer."""
    body = MESSAGE | {"diagnostics": {"previous_message_id": previous_id}} | changes
    answer = send(server, "messages", body).json()
    found = TypeAdapter(anthropic.types.Diagnostics | None).validate_python(answer["diagnostics"], strict=True)
    return found.cache_miss_reason if found else None, answer


def diagnose_response(server, changes, earlier_id):
    body = RESPONSE | {"prompt_cache_options": {"comparison_response_id": earlier_id}} | changes
    answer = send(server, "responses", body).json()
    adapter = TypeAdapter(openai.types.responses.response.PromptCacheDiagnostics)
    return adapter.validate_python(answer["prompt_cache_diagnostics"], strict=True), answer


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"messages": MESSAGE["messages"] + MORE}, None),
        ({"messages": [*MESSAGE["messages"], {"role": "user", "content": "Well? " * 9}]}, None),
        ({"system": [{"type": "text", "text": SYSTEM, "cache_control": {"type": "ephemeral"}}]}, None),
        ({"tools": TOOLS[::-1]}, "tools_changed"),
        ({"tools": TOOLS[:1], "system": "Else. " * 9}, "tools_changed"),
        ({"system": "It is noon. " + SYSTEM}, "system_changed"),
        ({"messages": [{"role": "user", "content": "Say. " + QUESTION}]}, "messages_changed"),
        ({"cache_salt": "s"}, "unavailable"),
    ],
)
def test_a_message_says_what_changed(lamp_server, changes, reason):
    nothing, first = diagnose_message(lamp_server, {})
    found, answer = diagnose_message(lamp_server, changes, first["id"])
    assert nothing is None and (found.type if found else None) == reason
    if reason and reason != "unavailable":
        usage = first["usage"]
        num_tokens = usage["input_tokens"] + usage["cache_read_input_tokens"]
        assert 0 < found.cache_missed_input_tokens <= num_tokens
    assert answer["retain"][0]["prefix"]["cached_tokens"] == answer["usage"]["cache_read_input_tokens"]
    unasked = send(lamp_server, "messages", MESSAGE | changes).json()
    assert unasked["diagnostics"] is None and "prefix" not in unasked["retain"][0]


@pytest.mark.parametrize(
    ("changes", "outcome"),
    [
        ({}, "cache_hit"),
        ({"input": RESPONSE["input"] + MORE}, "cache_hit"),
        ({"tools": FUNCTIONS[::-1]}, "tools_changed"),
        ({"instructions": "It is noon. " + SYSTEM}, "input_changed"),
        ({"input": "Say. " + QUESTION}, "input_changed"),
        ({"input": "Say. " + QUESTION, "reasoning": {"effort": "high"}}, "reasoning_effort_changed"),
        ({"reasoning": {"effort": "high"}}, "cache_hit"),  # this template shows it at the end only
        ({"cache_salt": "s"}, "prompt_cache_key_changed"),
    ],
)
def test_a_response_says_what_changed(lamp_server, changes, outcome):
    first = send(lamp_server, "responses", RESPONSE).json()
    assert first["prompt_cache_diagnostics"] is None
    found, _ = diagnose_response(lamp_server, changes, first["id"])
    assert getattr(found, "reason", found.type) == outcome
    if found.type == "cache_miss":
        assert 0 < found.cache_missed_tokens <= first["usage"]["input_tokens"]


def test_an_unchanged_prompt_that_the_cache_lost_is_no_hit(lamp_server):
    _, first = diagnose_message(lamp_server, {})
    earlier = send(lamp_server, "responses", RESPONSE).json()
    diagnose_response(lamp_server, {}, earlier["id"])  # from now on the cache remembers what it evicts
    tree = lamp_server.service.llm.cache.prefix_cache.tree
    for diagnose, earlier_id in ((diagnose_message, first["id"]), (diagnose_response, earlier["id"])):
        run_in_engine_thread(lamp_server, lambda: tree.evict(tree.num_evictable_pages)).result()
        found, answer = diagnose(lamp_server, {}, earlier_id)
        retain = answer["retain"]
        assert found.type == "unavailable"
        assert (retain if isinstance(retain, dict) else retain[0])["prefix"]["cause"] == "evicted"


def test_streams_say_it_where_the_vendors_do(lamp_server):
    _, first = diagnose_message(lamp_server, {})
    body = MESSAGE | {"diagnostics": {"previous_message_id": first["id"]}, "system": "Else. " * 9, "stream": True}
    start = send(lamp_server, "messages", body).text.split("\n")[1]
    message = json.loads(start.removeprefix("data: "))["message"]
    assert message["diagnostics"]["cache_miss_reason"]["type"] == "system_changed"
    earlier = send(lamp_server, "responses", RESPONSE).json()
    body = RESPONSE | {"prompt_cache_options": {"comparison_response_id": earlier["id"]}, "stream": True}
    end = send(lamp_server, "responses", body).text.strip().split("\n")[-1]
    response = json.loads(end.removeprefix("data: "))["response"]
    assert response["prompt_cache_diagnostics"] == {"type": "cache_hit"}


def test_only_answers_of_the_same_key_that_asked_are_known(lamp_server, secured_server):
    unasked = send(lamp_server, "messages", MESSAGE).json()
    for answer_id in (unasked["id"], "msg_unknown"):
        assert diagnose_message(lamp_server, {}, answer_id)[0].type == "previous_message_not_found"
    assert diagnose_response(lamp_server, {}, "resp_unknown")[0].type == "comparison_response_not_found"
    ann, bob = ({"x-api-key": key} for key in API_KEYS.values())
    body = {name: MESSAGE[name] for name in ("model", "max_tokens", "messages")} | {"diagnostics": {}}
    first = send(secured_server, "messages", body, **ann).json()
    body["diagnostics"] = {"previous_message_id": first["id"]}
    assert send(secured_server, "messages", body, **ann).json()["diagnostics"] is None
    reason = send(secured_server, "messages", body, **bob).json()["diagnostics"]["cache_miss_reason"]
    assert reason == {"type": "previous_message_not_found"}


def fingerprint_of(tokens, tools=b"") -> PromptFingerprint:
    blocks = hash_blocks(b"", np.asarray(tokens, np.int32), BLOCK_SIZE)
    return PromptFingerprint({PromptChange.TOOLS: tools}, [b""], blocks, len(tokens))


@given(st.lists(st.integers(0, 9), max_size=200), st.integers(0, 200), st.lists(st.integers(0, 9), max_size=200))
def test_missed_tokens_are_right_to_a_block(shared, num_shared, rest):
    """What is missed of two prompts is what the shorter one has behind the common tokens; less than a block is none."""
    earlier = shared
    current = shared[:num_shared] + rest
    behind = min(len(earlier), len(current)) - common_prefix_length(np.asarray(earlier), np.asarray(current))
    found = compare(fingerprint_of(earlier), fingerprint_of(current, b"other"))
    if found.change is None:
        assert found == PromptComparison() and behind < BLOCK_SIZE
    else:
        assert found.change is PromptChange.TOOLS and 0 <= found.num_missed_tokens - behind < BLOCK_SIZE
    assert compare(fingerprint_of(earlier), fingerprint_of(current)).change is None, "nothing has changed"


def test_fingerprints_are_bounded():
    kept = fingerprint_of(range(320))
    fingerprints = PromptFingerprints(max_bytes=3 * kept.num_bytes)
    unknown = PromptComparison(PromptChange.NOT_FOUND)
    for i in range(5):
        fingerprints.put("ann", str(i), kept)
        assert fingerprints.num_bytes <= fingerprints.max_bytes
    found = [fingerprints.compare("ann", str(i), kept) for i in range(5)]
    assert found == [unknown] * 2 + [PromptComparison()] * 3
    assert fingerprints.compare("bob", "4", kept) == unknown
    fingerprints.put("ann", "big", replace(kept, blocks=kept.blocks * 99))
    assert fingerprints.num_bytes == 0
