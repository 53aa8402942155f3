"""Our own clients: `tools.load` measures load, and `retain chat --url` prints what the server generates."""

import io
import json
from dataclasses import replace
from itertools import pairwise

import httpx
import pytest

from retain.cli import main
from retain.cli.chat import content_of
from retain.http_client import HttpClient
from tools import load


@pytest.mark.slow
def test_load_is_reported(server):
    config = load.LoadConfig("smollm2", server.url, ttft_slo=60_000, tpot_slo=60_000)
    requests = load.poisson_requests(6, request_rate=20, prompt_words=30, output_len=5, seed=3)
    report = load.run(config, requests)
    assert (report["requests"], report["num_failed"], report["slo_attainment"]) == (6, 0, 1.0)
    assert report["output_throughput"] * report["duration_s"] == pytest.approx(30, rel=0.05)
    assert report["input_throughput"] * report["duration_s"] == pytest.approx(6 * 30, rel=0.1)
    assert 0 < report["ttft_p50_ms"] <= report["ttft_p90_ms"] <= report["ttft_p99_ms"] <= report["e2el_p99_ms"]
    assert load.run(replace(config, ttft_slo=0, tpot_slo=0), requests)["request_goodput"] == 0


def test_poisson_arrivals_have_given_rate():
    requests = load.poisson_requests(4000, request_rate=50, prompt_words=1, output_len=1)
    gaps = [b.arrival_time - a.arrival_time for a, b in pairwise(requests)]
    mean = sum(gaps) / len(gaps)
    assert mean == pytest.approx(1 / 50, rel=0.1)
    assert sum((g - mean) ** 2 for g in gaps) / len(gaps) == pytest.approx(mean**2, rel=0.2)  # exponential
    assert all(r.arrival_time == 0 for r in load.poisson_requests(3, None, 1, 1))


def test_trace_shares_prefixes_by_hash_ids(tmp_path):
    file = tmp_path / "trace.jsonl"
    records = [
        {"timestamp": 1000 * i, "input_length": 1100 + i, "output_length": 64, "hash_ids": [0, 1, 5 + i]}
        for i in range(3)
    ]
    file.write_text("\n".join(map(json.dumps, records)))
    requests = load.load_trace(file, 2, speedup=10, length_divisor=8)
    assert [r.arrival_time for r in requests] == [0, 0.1] and requests[0].output_len == 8
    a, b = (r.prompt.split() for r in requests)
    assert len(a) == 1100 // 8 and a[:128] == b[:128] and a[128:] != b[128:]
    file.write_text('{"timestamp": 0}')
    with pytest.raises(ValueError, match="line 1"):
        load.load_trace(file, 2, 1, 1)


def test_unreachable_server_prints_one_line(capsys):
    command = ["--url", "http://127.0.0.1:1/v1", "--model", "x", "--num-prompts", "2"]
    assert load.main(command) == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 1


@pytest.mark.slow
def test_chat_with_server(smollm2_server, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("What is the capital of France?\nAnd of Italy?\n\n"))
    command = ["chat", "--url", smollm2_server.url, "--system", "Be brief.", "--max-tokens", "8", "--temperature", "0"]
    assert main.main(command) == 0
    first, second = capsys.readouterr().out.strip().split("\n", 1)
    client = HttpClient(smollm2_server.url, None, httpx.Timeout(60))
    options = {"model": client.first_model(), "max_tokens": 8, "temperature": 0, "stream": True}

    def ask():
        return "".join(map(content_of, client.stream("/chat/completions", {**options, "messages": messages})))

    messages = [{"role": "system", "content": "Be brief."}]
    messages += [{"role": "user", "content": "What is the capital of France?"}]
    assert ask() == first and "Paris" in first
    messages += [{"role": "assistant", "content": first}, {"role": "user", "content": "And of Italy?"}]
    assert ask().strip() == second.strip()


@pytest.mark.slow
def test_server_error_prints_one_line(server, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("Hello\n"))
    assert main.main(["chat", "--url", server.url, "--kv-policy", "lru"]) == 2
    assert "unknown KV policy" in capsys.readouterr().err
