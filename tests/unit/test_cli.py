"""The command line, as a person or a script meets it: answers, JSON, streams, and what is missing."""

import dataclasses
import gc
import importlib
import io
import json
import os
import subprocess
import sys

import pytest

from retain import SamplingParams
from retain.bench.config import SpeculateBenchConfig
from retain.cli.args import build_parser, given_args
from retain.config import Config
from retain.kv.stores.folder import LockedFolder
from retain.server.config import Limits, ServerConfig
from tests.helpers.cli import assert_one_line_error, run_cli

RUN_ARGS = ("run", "--model", "smollm2", "--temperature", "0", "--max-tokens", "12")
FLOAT32_ARGS = ("--dtype", "float32", "--kv-memory", "256MiB", "--max-running-requests", "8")  # shared with test_llm.py
TINY_RUN_ARGS = ("run", "--model", "random:tiny", "--kv-memory", "16MiB", "--temperature", "0", "--max-tokens", "3")
pytestmark = pytest.mark.usefixtures("shared_engines")


def test_run_streams_text_and_prints_stats(capsys):
    code, out, err = run_cli(capsys, *RUN_ARGS, "The capital of France is")
    assert code == 0 and "Paris" in out
    assert "tokens/s" in err and "KV" in err and len(err.strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("model", "num_layers", "kv_heads", "head_dim"),
    [("random:tiny", 2, 2, 16), pytest.param("smollm2", 30, 3, 64, marks=pytest.mark.slow)],
)
def test_run_json_has_documented_keys(model, num_layers, kv_heads, head_dim, capsys, tmp_path):
    file = tmp_path / "prompt.txt"
    file.write_text("The capital of France is")
    options = (*RUN_ARGS[3:], "--ignore-eos", *FLOAT32_ARGS, "--json", "--logprobs", "2")
    code, out, err = run_cli(capsys, "run", "--model", model, "-f", file, *options)
    answer = json.loads(out)
    assert code == 0 and not err
    assert set(answer) == {"text", "token_ids", "finish_reason", "usage", "timings", "kv", "logprobs"}
    num_prompt = 5 if model == "smollm2" else len(file.read_bytes())
    assert len(answer["token_ids"]) == 12 and answer["finish_reason"] == "length"
    usage = {"prompt_tokens": num_prompt, "completion_tokens": 12, "total_tokens": num_prompt + 12}
    assert answer["usage"] == usage | {"prompt_tokens_details": {"cached_tokens": 0}}
    assert set(answer["timings"]) == {"load_s", "ttft_s", "decode_tok_s"}
    (group,) = answer["kv"]["groups"]
    assert group["layers"] == list(range(num_layers)) and group["policy"] == "full"
    bytes_per_slot = 2 * head_dim * 4 + 8
    assert group["slots_peak"] == 64
    assert group["bytes_peak"] == group["bytes_if_full"] == num_layers * kv_heads * 64 * bytes_per_slot
    assert all(len(p["top"]) == 2 and p["top"][0][0] == p["token"] for p in answer["logprobs"])


def test_chat_applies_chat_template(capsys, monkeypatch):
    code, out, _ = run_cli(capsys, *RUN_ARGS, "--chat", "Say hello.", "--json")
    assert code == 0 and json.loads(out)["usage"]["prompt_tokens"] > 20
    monkeypatch.setattr("sys.stdin", io.StringIO("Say hello.\nAnd again.\n"))
    code, out, err = run_cli(capsys, "chat", *RUN_ARGS[1:])
    assert code == 0 and len(err.strip().splitlines()) == 2


def test_prompt_is_read_from_standard_input(capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"Count: 1, 2, 3,")))
    assert "4, 5" in run_cli(capsys, *RUN_ARGS, "-").out


@pytest.mark.parametrize("options", [(), ("--json",)])
def test_run_exits_in_silence_when_the_pipe_closes(options, capsys, monkeypatch):
    """As `retain run ... | head -1` ends: while it streams, or when its buffered output is written at the end."""
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as closed:
        monkeypatch.setattr("sys.stdout", closed)
        code, _, err = run_cli(capsys, *TINY_RUN_ARGS, *options, "hello")
    assert (code, err) == (0, "")


@pytest.mark.parametrize("redirect", [False, True], ids=["stdout", "stdout and stderr"])
def test_interpreter_exits_in_silence_when_the_pipe_is_closed(redirect):
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, "-m", "retain.cli", "--help"],
        stdout=writer,
        stderr=writer if redirect else subprocess.PIPE,
        env={**os.environ, "PYTHONUNBUFFERED": ""},
    )
    os.close(writer)
    assert done.returncode == 0 and not done.stderr


def test_chat_with_a_server_names_the_missing_package(capsys, monkeypatch):
    monkeypatch.delitem(sys.modules, "retain.http_client", raising=False)
    monkeypatch.setitem(sys.modules, "httpx", None)
    assert_one_line_error(run_cli(capsys, "chat", "--url", "http://127.0.0.1:1/v1"), "pip install 'retain[client]'")


@pytest.mark.parametrize(
    "words", [("http://127.0.0.1:1",), ("--checks", "edits", "http://x", "--json"), ("--help",), ()]
)
def test_cachecheck_names_the_missing_package(words, capsys, monkeypatch):
    """Whatever is asked of it, options too."""
    monkeypatch.setitem(sys.modules, "cachecheck.command", None)
    assert_one_line_error(run_cli(capsys, "cachecheck", *words), "pip install ./packages/cachecheck")


def test_options_become_fields_of_their_types_and_absent_ones_stay_absent():
    """The namespace holds given options only, so the dataclasses alone hold the defaults."""
    words = "--kv-policy ring:window=9 --tier ram:capacity=1GB --tier disk:path=x,capacity=1GB --kv-memory 2MiB"
    words += " --max-running-requests 3 --temperature 0.5 --seed 7 --stop a --stop b --ignore-eos --logprobs 2"
    args = build_parser().parse_args(["run", *words.split(), "hello"])
    assert given_args(args, Config) == {
        "kv_policy": "ring:window=9",
        "tier": ("ram:capacity=1GB", "disk:path=x,capacity=1GB"),
        "kv_memory": 2 * 2**20,
        "max_running_requests": 3,
    }
    sampling = {"temperature": 0.5, "seed": 7, "stop": ("a", "b"), "ignore_eos": True, "logprobs": 2}
    assert given_args(args, SamplingParams) == sampling
    args = build_parser().parse_args(["serve", "--max-body-size", "1MiB", "--allow-drafter", "x", "--inspect"])
    assert given_args(args, Limits) == {"max_body_size": 2**20}
    assert given_args(args, ServerConfig) == {"api_keys": None, "allowed_drafters": ("x",), "enable_inspector": True}
    args = build_parser().parse_args(["bench", "speculate", "--context-lens", "60, 600", "--drafters", "ngram self"])
    assert given_args(args, SpeculateBenchConfig) == {"context_lens": (60, 600), "drafters": ("ngram", "self")}


def test_help_of_every_command_names_every_option_of_the_engine(capsys):
    benches = ("speed", "budget", "quality", "speculate", "prefix")
    for command in (("run",), ("chat",), ("serve",), *(("bench", b) for b in benches)):
        code, out, _ = run_cli(capsys, *command, "--help")
        assert code == 0
        assert all("--" + f.name.replace("_", "-") in out for f in dataclasses.fields(Config)), command


def test_log_level_chooses_what_is_logged_and_prompts_never_are(capsys):
    quiet = run_cli(capsys, *TINY_RUN_ARGS, "SECRET")
    loud = run_cli(capsys, *TINY_RUN_ARGS, "--log-level", "debug", "SECRET")
    assert quiet.code == loud.code == 0 and len(quiet.err.splitlines()) == 1
    assert "SECRET" not in loud.err


def test_log_goes_to_standard_error_from_its_level_on(capsys, monkeypatch):
    import logging

    from retain.cli import cache

    def log(args):
        for level in ("debug", "info", "warning", "error"):
            getattr(logging.getLogger("retain.kv"), level)("a %s", level)
        return 0

    monkeypatch.setattr(cache, "cache", log)
    for level, expected in (("debug", 4), ("info", 3), ("warning", 2), ("error", 1)):
        code, out, err = run_cli(capsys, "cache", "ls", ".", "--log-level", level)
        assert (code, out) == (0, "") and len(err.splitlines()) == expected
    assert len(run_cli(capsys, "cache", "ls", ".").err.splitlines()) == 2  # warning is the default
    assert build_parser().parse_args(["serve"]).log_level == "info"
    assert not logging.getLogger("retain").handlers  # the command leaves nothing behind


def test_cache_ls_verify_and_clear(capsys, tmp_path):
    file, store = tmp_path / "prompt.txt", tmp_path / "store"
    file.write_text("The capital of France is Paris. " * 30)
    command = (*TINY_RUN_ARGS, "-f", file, "--json", "--tier", f"disk:path={store},capacity=1GB")
    answers = [json.loads(run_cli(capsys, *command).out) for _ in range(2)]
    cached = [a["usage"]["prompt_tokens_details"]["cached_tokens"] for a in answers]
    assert cached[0] == 0 and cached[1] >= 192 and answers[0]["token_ids"] == answers[1]["token_ids"]
    lines = [json.loads(x) for x in run_cli(capsys, "cache", "ls", store, "--json").out.splitlines()]
    assert sum(x["pages"] for x in lines) * 64 >= cached[1] and all(x["kind"] == "text" for x in lines)
    code, out, _ = run_cli(capsys, "cache", "ls", store)
    assert code == 0 and "pages 0-" in out and "MiB" in out.splitlines()[-1]
    assert "all intact" in run_cli(capsys, "cache", "verify", store).out
    damaged = store / lines[0]["object"]
    damaged.write_bytes(damaged.read_bytes()[:-4096] + bytes(4096))
    code, out, _ = run_cli(capsys, "cache", "verify", store)
    assert code == 1 and "1 were damaged" in out
    assert_one_line_error(run_cli(capsys, *command, "--speculate", "draft:model=smollm2"), "vocabulary")
    other = LockedFolder(store)
    assert other.claim()  # the engine that failed holds no lock
    assert_one_line_error(run_cli(capsys, *command), "in use")
    other.close()
    assert run_cli(capsys, "cache", "clear", store).code == 0
    assert run_cli(capsys, "cache", "ls", store).out.startswith("0 spans")


def test_a_command_is_imported_without_collections_of_garbage(monkeypatch, capsys):
    """Afterwards they go on: also where the import fails."""
    assert gc.isenabled()
    seen = []

    def fail(name):
        seen.append((name, gc.isenabled()))
        raise ValueError("it is not there")

    monkeypatch.setattr(importlib, "import_module", fail)
    assert_one_line_error(run_cli(capsys, "run", "hello", "--model", "smollm2"), "it is not there")
    assert seen == [("retain.cli.run", False)] and gc.isenabled()
