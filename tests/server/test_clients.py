"""Our own clients: `retain bench serve` counts what it sends, `retain chat --url` says what the server says."""

import io
import json
from itertools import pairwise

import pytest

from retain.bench import serve as load
from retain.cli import main
from retain.cli.http_client import Client


def test_bench_serve_reports_load(server):
    about = load.LoadConfig(server.url, "smollm2", None, ttft_slo_s=60, tpot_slo_s=60)
    calls = load.poisson_requests(6, request_rate=20, prompt_words=30, output_len=5, seed=3)
    found = load.run(about, calls)
    assert (found["requests"], found["errors"], found["good"]) == (6, 0, 1.0)
    assert found["new_tok_s"] * found["seconds"] == pytest.approx(30, rel=0.05)
    assert found["prompt_tok_s"] * found["seconds"] == pytest.approx(6 * 30, rel=0.1)
    assert 0 < found["ttft_p50_ms"] <= found["ttft_p90_ms"] <= found["ttft_p99_ms"] <= found["answer_p99_ms"]
    assert load.run(load.LoadConfig(server.url, "smollm2", None, ttft_slo_s=0, tpot_slo_s=0), calls)["goodput"] == 0


def test_poisson_arrivals_have_given_rate():
    calls = load.poisson_requests(4000, request_rate=50, prompt_words=1, output_len=1)
    gaps = [b.arrival_time - a.arrival_time for a, b in pairwise(calls)]
    mean = sum(gaps) / len(gaps)
    assert mean == pytest.approx(1 / 50, rel=0.1)
    assert sum((g - mean) ** 2 for g in gaps) / len(gaps) == pytest.approx(mean**2, rel=0.2)  # exponential
    assert all(c.arrival_time == 0 for c in load.poisson_requests(3, None, 1, 1))


def test_trace_shares_prefixes_by_hash_ids(tmp_path):
    file = tmp_path / "trace.jsonl"
    records = [
        {"timestamp": 1000 * i, "input_length": 1100 + i, "output_length": 64, "hash_ids": [0, 1, 5 + i]}
        for i in range(3)
    ]
    file.write_text("\n".join(map(json.dumps, records)))
    calls = load.load_trace(file, 2, speedup=10, length_divisor=8)
    assert [c.arrival_time for c in calls] == [0, 0.1] and calls[0].output_len == 8
    a, b = (c.prompt.split() for c in calls)
    assert len(a) == 1100 // 8 and a[:128] == b[:128] and a[128:] != b[128:]
    file.write_text('{"timestamp": 0}')
    with pytest.raises(ValueError, match="line 1"):
        load.load_trace(file, 2, 1, 1)


def test_unreachable_server_prints_one_line(capsys):
    assert main.main(["bench", "serve", "--url", "http://127.0.0.1:1/v1", "--model", "x", "--items", "2"]) == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 1


def test_chat_with_server(server, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("What is the capital of France?\nAnd of Italy?\n\n"))
    asked = ["chat", "--url", server.url, "--system", "Be brief.", "--max-tokens", "12", "--temperature", "0"]
    assert main.main(asked) == 0
    first, second = capsys.readouterr().out.strip().split("\n", 1)
    client = Client(server.url)
    talk = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is the capital of France?"}]
    options = {"max_tokens": 12, "temperature": 0}
    assert "".join(client.stream(talk, options)) == first and "Paris" in first
    talk += [{"role": "assistant", "content": first}, {"role": "user", "content": "And of Italy?"}]
    assert "".join(client.stream(talk, options)).strip() == second.strip()


def test_server_error_prints_one_line(server, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("Hello\n"))
    assert main.main(["chat", "--url", server.url, "--kv-policy", "lru"]) == 2
    assert "unknown KV policy" in capsys.readouterr().err
