"""`--normalize-prompts`: prompts of an agent that say the same begin with the same tokens."""

from random import Random

import pytest

from retain.server.openai.chat_protocol import ChatCompletionRequest
from retain.server.openai.prompt_normalization import DROPPED_HEADER, SORTED_TOOLS, normalize_prompt
from tests.server.agent_model import AGENT_TEMPLATE, save_agent_model
from tests.server.conftest import HTTP, run_server
from tests.server.test_agent_traffic import TOOLS

HEADER = "x-anthropic-billing-header: cc_version=2.1.260.9f1; cc_entrypoint=cli; cch={:05x};"
SYSTEM = "You are a coding agent. Read before you write. " * 20
NUM_TURNS = 6


def agent_turns():
    """Yield the requests of a coding agent: a new number in each, and the tools as their servers answered."""
    random = Random(0)
    messages = [{"role": "user", "content": "Fix the bug in src."}]
    for turn in range(NUM_TURNS):
        system = [{"type": "text", "text": text} for text in (HEADER.format(random.randrange(16**5)), SYSTEM)]
        fields = {"model": "smollm2", "max_tokens": 1, "temperature": 0}
        yield fields | {"system": system, "tools": random.sample(TOOLS, len(TOOLS)), "messages": list(messages)}
        call = {"type": "tool_use", "id": f"t{turn}", "name": "read_file", "input": {"path": f"src/{turn}.py"}}
        result = {"type": "tool_result", "tool_use_id": f"t{turn}", "content": "for line in lines: print(line)"}
        messages += [{"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]


@pytest.mark.parametrize("normalizes", [False, True])
def test_an_agent_finds_its_prompts(tmp_path, normalizes, caplog):
    """Tokens of the later turns that are found in the cache: next to none become all but those that are new."""
    folder = save_agent_model(tmp_path, "llama")
    options = {"kv_memory": "128MiB", "dtype": "float32"}
    with run_server(str(folder), options, AGENT_TEMPLATE, normalize_prompts=normalizes) as server:
        answers = [HTTP.post(f"{server.url}/messages", json=turn) for turn in agent_turns()]
        num_counted = HTTP.post(f"{server.url}/messages/count_tokens", json=turn_to_count(list(agent_turns())[-1]))
    usages = [answer.json()["usage"] for answer in answers]
    cached = [usage["cache_read_input_tokens"] for usage in usages]
    prompts = [usage["input_tokens"] + found for usage, found in zip(usages, cached, strict=True)]
    share = sum(cached[1:]) / sum(prompts[1:])
    assert share > 0.95 if normalizes else share < 0.04
    note = f"{DROPPED_HEADER}; {SORTED_TOOLS}" if normalizes else None
    assert [answer.headers.get("x-retain-warning") for answer in answers] == [note] * NUM_TURNS
    assert num_counted.json() == {"input_tokens": prompts[-1]}
    suggested = [record for record in caplog.records if "--normalize-prompts" in record.message]
    assert len(suggested) == (0 if normalizes else 1)


def turn_to_count(body):
    return {name: body[name] for name in ("model", "system", "tools", "messages")}


def test_every_api_says_so(tmp_path):
    text = f"{HEADER.format(1)}\nBe brief."
    tools = [{"type": "function", "name": name, "parameters": {}} for name in ("b", "a")]
    functions = [{"type": "function", "function": {"name": name, "parameters": {}}} for name in ("b", "a")]
    chat = {"messages": [{"role": "system", "content": text}, {"role": "user", "content": "Hi"}], "tools": functions}
    response = {"instructions": text, "input": "Hi", "tools": tools}
    with run_server("random:tiny", {"kv_memory": "64MiB"}, AGENT_TEMPLATE, normalize_prompts=True) as server:
        for path, body in (("chat/completions", chat), ("responses", response)):
            limit = {"max_output_tokens" if path == "responses" else "max_tokens": 1}
            for stream in (False, True):
                answer = HTTP.post(f"{server.url}/{path}", json={"model": "smollm2", "stream": stream, **limit} | body)
                assert answer.headers["x-retain-warning"] == f"{DROPPED_HEADER}; {SORTED_TOOLS}"


@pytest.mark.parametrize(
    ("content", "shown"),
    [
        (HEADER.format(7) + "\n\nBe brief.", ["Be brief."]),
        ([HEADER.format(7), "Be brief."], ["Be brief."]),
        ([HEADER.format(7) + "\nBe", " brief."], ["Be", " brief."]),
        (HEADER.format(7), None),
        ("Be brief.\n" + HEADER.format(7), ...),
        (["Be brief.", HEADER.format(7)], ...),
        ([], ...),
    ],
)
def test_only_a_header_at_the_beginning_is_dropped(content, shown):
    def to_content(texts):
        return texts if isinstance(texts, str) else [{"type": "text", "text": text} for text in texts]

    user = {"role": "user", "content": HEADER.format(8)}
    tools = [{"type": "function", "function": {"name": name}} for name in "ab"]
    body = ChatCompletionRequest(
        model="m", messages=[{"role": "system", "content": to_content(content)}, user], tools=tools
    )
    found, notes = normalize_prompt(body)
    if shown is ...:
        assert found == body and notes == []
        return
    system = [{"role": "system", "content": to_content(shown)}] if shown else []
    assert found == ChatCompletionRequest(model="m", messages=[*system, user], tools=tools)
    assert notes == [DROPPED_HEADER] and normalize_prompt(found) == (found, [])


def test_a_conversation_keeps_a_message():
    body = ChatCompletionRequest(model="m", messages=[{"role": "system", "content": HEADER.format(7)}])
    found, notes = normalize_prompt(body)
    assert [message.content for message in found.messages] == [[]] and notes == [DROPPED_HEADER]
