"""The bench of a coding agent's sessions: recorded texts, the same in every method, which a cache keeps or not."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch

from retain import LLM, SamplingParams
from retain.config import Config
from retain.kv.prefix.cache import PrefixCache
from retain.sequences import count_common
from tests.helpers.cli import assert_one_line_error, run_cli
from tests.helpers.marks import slow
from tools.agent_bench.__main__ import main
from tools.agent_bench.bench import Method
from tools.agent_bench.coding_agent import CodingAgent
from tools.agent_bench.config import AgentBenchConfig
from tools.agent_bench.hints import AgentHints
from tools.agent_bench.recording import Turn, read_conversations, to_sessions
from tools.agent_bench.replay import Replay

pytestmark = pytest.mark.usefixtures("shared_engines")
SIZES = ("--turns", 3, "--system-len", 40, "--tool-output-len", 40, "--answer-len", 12, "--kl-sessions", 1, "--json")
TIMES = ("ttft_p50_ms", "ttft_p95_ms", "tok_s")
BUDGET = "h2o:budget=30%,interval=4"


def run_bench(capsys: pytest.CaptureFixture[str], model: str, *options: object) -> list[dict[str, Any]]:
    result = run_cli(capsys, "--model", model, *SIZES, *options, main=main)
    assert result.code == 0, result.err
    return [{k: v for k, v in json.loads(line).items() if k not in TIMES} for line in result.out.splitlines()]


@pytest.mark.parametrize("model", ["tiny_smollm2", *slow("random:tiny")])
def test_methods_see_the_same_texts(
    model: str, tiny_smollm2: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A recording of generated conversations replays with the same figures. Keeping everything has KL 0."""
    file = tmp_path / "recording.jsonl"
    model = tiny_smollm2 if model == "tiny_smollm2" else model
    options = ("--methods", f"full; {BUDGET};full int8", "--sessions", 2, "--edit-rate", 0.5, "--min-found", 1)
    lines = run_bench(capsys, model, *options, "--save-recording", file, "--output-dir", tmp_path)
    assert run_bench(capsys, model, *options, "--recording", file) == lines
    assert [(x["method"], x.get("sessions"), x.get("most_sessions")) for x in lines] == [
        ("full", 2, None),
        (BUDGET, 2, None),
        ("full int8", 2, None),
        ("full", None, 2),
        (BUDGET, None, 0),  # what goes back to an earlier message finds nothing
        ("full int8", None, 2),
    ]
    full, budget, int8, *_ = lines
    assert full["found_share"] == int8["found_share"] == 1 > budget["found_share"] > 0
    assert full["kl"] == 0 < int8["kl"] < budget["kl"] and full["top1_agreement"] == 1
    saved = json.loads((tmp_path / "agent.json").read_text())
    assert [{k: v for k, v in line.items() if k not in TIMES} for line in saved] == lines


def test_a_seed_gives_the_same_conversations() -> None:
    configs = [AgentBenchConfig(turns=6, edit_rate=0.2, branch_rate=0.5, seed=seed) for seed in (1, 1, 2)]
    first, again, other = (CodingAgent(config, lambda text: len(text) // 3).make_sessions(6) for config in configs)
    assert first == again != other
    assert len(first) > len({c.session for c in first}) == 6  # some went back
    for c in first:
        assert [m["role"] for m in c.messages] == ["system", *["user", "assistant"] * (len(c.messages) // 2)]
    pairs = [(a, b) for a, b in combinations(first, 2) if a.session != b.session]
    shared = [count_common(a.messages, b.messages) for a, b in pairs]
    assert min(shared) == 1 < max(shared)  # the system prompt, or more of another session


def test_a_small_pool_holds_fewer_sessions(capsys: pytest.CaptureFixture[str]) -> None:
    """What does not fit is computed again: at more sessions a method is not run."""
    options = ("--kv-memory", "350KiB", "--page-size", 16, "--edit-rate", 0, "--branch-rate", 0)
    options = (*options, "--sessions", "1,5,6", "--min-found", 1, "--methods", "full;full int8;full ram:capacity=1GiB")
    lines = run_bench(capsys, "random:tiny", *options)
    found = {(line["method"], line["sessions"]): line["found_share"] for line in lines if "sessions" in line}
    assert found["full", 1] == 1 > found["full", 5] and ("full", 6) not in found
    assert found["full int8", 5] > found["full", 5]
    assert {line["kl"] for line in lines if "sessions" in line and "int8" not in line["method"]} == {0}


def test_a_turn_that_no_memory_holds_ends_one_method(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    options = ("--kv-memory", "300KiB", "--sessions", 1, "--system-len", 700, "--methods", "full;full int4")
    options = (*options, "--store-dir", tmp_path, "--turns", 1)
    full, int4, *most = run_bench(capsys, "random:tiny", *options)
    assert "KV memory holds" in full["error"] and full["found_share"] == 0 and "error" not in int4
    assert [x["most_sessions"] for x in most] == [0, 1]
    assert not list(tmp_path.iterdir())


def test_a_session_ends_before_a_turn_that_exceeds_the_context(
    tmp_path: Path, load_shared_llm: Callable[[Config], LLM]
) -> None:
    """A model without a chat template too. An answer of no tokens is no turn."""
    llm = load_shared_llm(Config("random:tiny"))
    texts = ["Hi", "Hello.", "word " * 9000, "Yes."]
    messages = [{"role": role, "content": text} for role, text in zip(["user", "assistant"] * 2, texts, strict=True)]
    file = tmp_path / "file.jsonl"
    file.write_text(json.dumps({"messages": messages}))
    (turns,) = to_sessions(llm, read_conversations(file), seed=0, mean_pause=1.0, max_len=2048)
    assert len(turns) == 1


def test_a_method_names_what_an_engine_keeps_and_where() -> None:
    method = Method.parse(f"int8 {BUDGET}  ram:capacity=1GiB disk:capacity=2GiB")
    found = method.configure(Config("model"), "/folder")
    assert (found.kv_policy, found.kv_dtype) == (BUDGET, "int8")
    assert found.tier == ("ram:capacity=1GiB", "disk:capacity=2GiB,path=/folder")
    assert Method.parse("full").configure(Config("model"), "/folder") == Config("model", kv_policy="full")


@pytest.mark.parametrize("policy", ["full", BUDGET])
def test_dictated_answers_are_what_an_engine_would_say(
    policy: str, tiny_smollm2: str, load_shared_llm: Callable[[Config], LLM]
) -> None:
    """Where the recorded answers are the engine's own, greedy ones, each token of a replay is its likeliest, too."""
    llm = load_shared_llm(Config(tiny_smollm2, kv_policy=policy, dtype="float32"))
    assert isinstance(llm.cache.prefix_cache, PrefixCache)
    sessions = []
    for i in range(2):
        text: list[int] = []
        turns = []
        for turn in range(3):
            text = [*text, *range(100 * i + 40 * turn + 10, 100 * i + 40 * turn + 50 - turn)]
            params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True, seed=0)
            (output,) = llm.generate([text], params)
            turns.append(Turn(text, output.token_ids, pause=0.1))
            text = [*text, *output.token_ids]
        sessions.append(turns)
    llm.cache.prefix_cache.tree.clear()
    answers = {(i, t): turn.answer for i, turns in enumerate(sessions) for t, turn in enumerate(turns)}
    likeliest = {
        key: torch.nn.functional.one_hot(torch.tensor(a), llm.spec.vocab_size).half() for key, a in answers.items()
    }
    results = Replay(llm, sessions, likeliest, AgentHints("none", 0.5, 0.05)).run()
    assert sorted((r.session, r.turn) for r in results) == sorted(answers)
    for r in results:
        assert r.distance and r.distance.num_agreed == r.num_answer == 8
        assert r.num_found == r.num_known == (len(sessions[r.session][r.turn - 1].prompt) + 7 if r.turn else 0)
        assert r.ttft_s and r.ttft_s > 0


def test_recordings_of_others(tiny_smollm2: str, tmp_path: Path, load_shared_llm: Callable[[Config], LLM]) -> None:
    """Tools, parts and calls become texts that alternate; a later line goes on where the two part."""
    call = {"id": "1", "function": {"name": "cat", "arguments": '{"path": "a.py"}'}}
    begin = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Read "}, {"type": "image"}, "a"]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
    ]
    first = [*begin, {"role": "tool", "content": "x = 1"}, {"role": "user", "content": "So?", "pause": 3}]
    other = [*begin, {"role": "user", "content": "No.", "pause": 7.5}, {"role": "assistant", "content": "Oh."}]
    lines = [
        {"session": "s", "messages": [*first, {"role": "assistant", "content": "x is 1."}]},
        {"session": "s", "messages": other},
    ]
    file = tmp_path / "file.jsonl"
    file.write_text("\n".join(map(json.dumps, lines)))
    conversations = read_conversations(file)
    assert [m["content"] for m in conversations[0].messages] == [
        "Be brief.",
        "Read ",
        '{"name": "cat", "arguments": "{\\"path\\": \\"a.py\\"}"}',
        "x = 1\nSo?",
        "x is 1.",
    ]
    llm = load_shared_llm(Config(tiny_smollm2))
    (turns,) = to_sessions(llm, conversations, seed=0, mean_pause=1.0, max_len=2048)
    assert len(turns) == 3 and turns[2].pause == 7.5
    assert turns[1].pause == 3
    assert turns[1].num_known(turns[0]) == len(turns[0].prompt) + len(turns[0].answer) - 1
    assert 0 < turns[2].num_known(turns[1]) < turns[1].num_known(turns[0]) + 8
    for turn in turns:
        assert turn.answer[-1] in llm.tokenizer.stop_token_ids
        assert llm.tokenizer.decode(turn.prompt).endswith("assistant\n")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--methods", "full;h2o"], "budget"),
        (["--methods", "int8 ram:capacity=1GiB"], "should be a policy"),
        (["--methods", "full int8 int4"], "at most one dtype"),
        (["--methods", "full disk:size=1"], "disk"),
        (["--sessions", "0"], "at least 1"),
        (["--sessions", ""], "at least one"),
        (["--edit-rate", "2"], "at most 1"),
        (["--kv-dtype", "int8"], "name --kv-dtype in --methods"),
        (["--tier", "ram:capacity=1GiB"], "name --tier in --methods"),
        (["--prefix-cache", "off"], "the bench sets it itself"),
        (["--recording", "/nowhere"], "No such file"),
        (["--store-dir", "/nowhere"], "/nowhere is no folder"),
        (["--save-recording", "/nowhere/file"], "/nowhere is no folder"),
        (
            ["--recording", 'FILE:{"messages": [{"role": "user", "content": "\\ud800"}]}'],
            "jsonl:1: a text has half",
        ),
        (["--recording", "FILE:[1]"], "not an object"),
        (["--recording", 'FILE:{"messages": [1]}'], "needs messages"),
        (["--recording", 'FILE:{"messages": [{"role": "poet"}]}'], "unknown role 'poet'"),
        (["--recording", 'FILE:{"messages": [{"role": ["user"]}]}'], "unknown role"),
        (["--recording", 'FILE:{"messages": [{"role": "user", "pause": -1}]}'], "a pause must be seconds"),
        (["--recording", 'FILE:{"messages": [{"role": "user", "content": 5}]}'], "content must be a text"),
        (["--recording", 'FILE:{"messages": [{"role": "user", "content": "Hi"}]}'], "no conversation has an answer"),
    ],
)
def test_bad_input_gets_one_line(
    options: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if options[1].startswith("FILE:"):
        file = tmp_path / "recording.jsonl"
        file.write_text(options[1].removeprefix("FILE:"))
        options = [options[0], str(file)]
    assert_one_line_error(run_cli(capsys, "--model", "random:tiny", *options, main=main), message)
