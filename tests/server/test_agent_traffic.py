"""A coding agent's conversations: after the first turn no token of the prompt is computed twice."""

import anthropic
import pytest

from tests.helpers.engines import AlwaysLoad
from tests.helpers.tiers import disk_spec, offloader_of
from tests.server.agent_model import AGENT_TEMPLATE, dictated_answers, save_agent_model
from tests.server.conftest import run_server

pytestmark = pytest.mark.slow

SYSTEM = [
    {"type": "text", "text": "You are a coding agent. Read before you write."},
    {"type": "text", "text": "The folder is a git repository.", "cache_control": {"type": "ephemeral", "ttl": "1h"}},
]
VERBS = ("read", "write", "list", "search", "move")
NOUNS = ("file", "folder", "branch", "test")
TOOLS = [
    {
        "name": f"{verb}_{noun}",
        "description": f"To {verb} a {noun}.",
        "input_schema": {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]},
    }
    for verb in VERBS
    for noun in NOUNS
]
ANSWERS = [
    "<think>Where is it?</think>I look for it."
    '<tool_call>{"name": "list_folder", "arguments": {"path": "src"}}</tool_call>',
    '<tool_call>{"name": "read_file", "arguments": {"path": "src/a.py"}}</tool_call>'
    '<tool_call>{"name": "read_file", "arguments": {"path": "src/b.py"}}</tool_call>',
    'I fix it.<tool_call>{"name": "write_file", "arguments": {"path": "src/a.py"}}</tool_call>',
    "It is fixed: the loop ended one line too early.",
    "It was the last line of the file.",
]
PAGE_SIZE = 64
RESULTS = ["a.py\nb.py\n", "for line in lines[:-1]:\n    print(line)\n", "written"]


@pytest.fixture(scope="module", params=["llama", "gemma3_text"])
def server(request, tmp_path_factory):
    """A model without and one with sliding windows."""
    folder = save_agent_model(tmp_path_factory.mktemp(request.param), request.param)
    options = {"kv_memory": "128MiB", "dtype": "float32", "max_running_requests": 2}
    with run_server(str(folder), options, AGENT_TEMPLATE) as running:
        yield running


def run_turns(client, messages, turns):
    """Yield the usage of each turn, and add to the messages what the agent sends after it."""
    for turn in turns:
        last = messages[-1]["content"]
        if isinstance(last, list):  # agents move their breakpoint along
            last[-1] = {**last[-1], "cache_control": {"type": "ephemeral"}}
        answer = client.messages.create(model="smollm2", max_tokens=400, system=SYSTEM, tools=TOOLS, messages=messages)
        yield answer.usage
        if isinstance(last, list):
            del last[-1]["cache_control"]
        calls = [block for block in answer.content if block.type == "tool_use"]
        results = [{"type": "tool_result", "tool_use_id": call.id, "content": RESULTS[turn]} for call in calls]
        text = [{"type": "text", "text": "What was wrong?"}]
        messages += [{"role": "assistant", "content": answer.content}, {"role": "user", "content": results or text}]


def test_no_prompt_token_is_computed_twice(server):
    """Every turn finds the whole last prompt and its answer, but for the last token, which was never an input."""
    client = anthropic.Anthropic(base_url=server.url.removesuffix("/v1"), api_key="none", max_retries=0)
    with dictated_answers(server, ANSWERS):
        usages = list(run_turns(client, [{"role": "user", "content": "Fix the bug in src."}], range(len(ANSWERS))))
    known = 0
    for usage in usages:
        assert usage.cache_read_input_tokens == known
        prompt = usage.input_tokens + usage.cache_creation_input_tokens + usage.cache_read_input_tokens
        known = prompt + usage.output_tokens - 1
    assert usages[0].cache_creation_input_tokens > 0 and known > 3000
    assert server.service.llm.cache.prefix_cache.tree.pins


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_a_restart_with_a_disk_tier_keeps_the_prefix(family, tmp_path):
    """The turn after a restart computes what is new, and at most a page before it."""
    folder, messages = save_agent_model(tmp_path, family), [{"role": "user", "content": "Fix the bug in src."}]
    options = {"kv_memory": "128MiB", "dtype": "float32", "max_running_requests": 2, "prefix_cache": "exact"}
    options["tier"] = [disk_spec(tmp_path / "store", "1GiB")]
    usages = []
    for turns in (range(3), range(3, 4)):
        with run_server(str(folder), options, AGENT_TEMPLATE) as server:
            offloader_of(server.service.llm.engine).cost_model = AlwaysLoad()
            client = anthropic.Anthropic(base_url=server.url.removesuffix("/v1"), api_key="none", max_retries=0)
            with dictated_answers(server, [ANSWERS[turn] for turn in turns]):
                usages += run_turns(client, messages, turns)
    before, after = usages[-2:]
    prompt = before.input_tokens + before.cache_creation_input_tokens + before.cache_read_input_tokens
    known = prompt + before.output_tokens - 1
    assert known - PAGE_SIZE < after.cache_read_input_tokens <= known
