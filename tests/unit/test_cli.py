"""The command line, as a person or a script meets it: answers, JSON, streams, and one clear line for bad input."""

import io
import json
import subprocess
import sys

import torch
from safetensors.torch import save_file

from retain.cli.main import main
from retain.kv.offload.sqlite_index import StoreIndex
from retain.models.resolve import resolve_model


def run_cli(capsys, *argv):
    """Exit code, standard output, standard error."""
    try:
        code = main([str(a) for a in argv])
    except SystemExit as stop:
        code = stop.code
    out, err = capsys.readouterr()
    return code, out, err


RUN_ARGS = ("run", "--model", "smollm2", "--temperature", "0", "--max-tokens", "12")


def test_run_streams_text_and_prints_stats(capsys):
    code, out, err = run_cli(capsys, *RUN_ARGS, "The capital of France is")
    assert code == 0 and "Paris" in out
    assert "tokens/s" in err and "KV" in err and len(err.strip().splitlines()) == 1


def test_run_json_has_documented_keys(capsys, tmp_path):
    file = tmp_path / "prompt.txt"
    file.write_text("The capital of France is")
    code, out, err = run_cli(capsys, *RUN_ARGS, "-f", file, "--dtype", "float32", "--json", "--logprobs", "2")
    answer = json.loads(out)
    assert code == 0 and not err
    assert set(answer) == {"text", "token_ids", "finish_reason", "usage", "timings", "kv", "logprobs"}
    usage = {"prompt_tokens": 5, "completion_tokens": len(answer["token_ids"]), "total_tokens": 17}
    assert answer["usage"] == usage | {"prompt_tokens_details": {"cached_tokens": 0}}
    assert set(answer["timings"]) == {"load_s", "ttft_s", "decode_tok_s"}
    (group,) = answer["kv"]["groups"]
    assert group["layers"] == list(range(30)) and group["policy"] == "full"
    assert group["slots_peak"] == 64 and group["bytes_peak"] == group["bytes_if_full"] == 90 * 64 * (2 * 64 * 4 + 8)
    assert all(len(p["top"]) == 2 and p["top"][0][0] == p["token"] for p in answer["logprobs"])


def test_chat_applies_chat_template(capsys, monkeypatch):
    code, out, _ = run_cli(capsys, *RUN_ARGS, "--chat", "Say hello.", "--json")
    assert code == 0 and json.loads(out)["usage"]["prompt_tokens"] > 20
    monkeypatch.setattr("sys.stdin", io.StringIO("Say hello.\nAnd again.\n"))
    code, out, err = run_cli(capsys, "chat", *RUN_ARGS[1:])
    assert code == 0 and len(err.strip().splitlines()) == 2


def test_stdin_prompt_and_closed_pipe():
    command = [sys.executable, "-m", "retain.cli.main", *RUN_ARGS, "-"]
    whole = subprocess.run(command, input=b"Count: 1, 2, 3,", capture_output=True, check=True).stdout
    assert b"4, 5" in whole
    closed = subprocess.run(f"echo Count: 1, 2 | {' '.join(command)} | head -c 1", shell=True, capture_output=True)
    assert b"Traceback" not in closed.stderr


def bad_inputs(tmp_path):
    """(arguments, a word of the line that must come out)."""
    gguf = resolve_model("smollm2").read_bytes()
    (tmp_path / "cut.gguf").write_bytes(gguf[: len(gguf) // 2])
    (tmp_path / "header.gguf").write_bytes(gguf[:1000])
    (tmp_path / "noise.gguf").write_bytes(b"\x00noise" * 1000)
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    (tmp_path / "long.txt").write_text("word " * 9000)
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "mamba"}')
    save_file({"x": torch.zeros(2)}, folder / "model.safetensors")
    pickled = tmp_path / "pickled"
    pickled.mkdir()
    (pickled / "config.json").write_text('{"model_type": "llama"}')
    torch.save({}, pickled / "pytorch_model.bin")
    hello = "hello"
    yield ("run", "--model", tmp_path / "none.gguf", hello), "none.gguf"
    yield ("run", "--model", tmp_path / "cut.gguf", hello), "damaged"
    yield ("run", "--model", tmp_path / "header.gguf", hello), "damaged"
    yield ("run", "--model", tmp_path / "noise.gguf", hello), "GGUF"
    yield ("run", "--model", folder, hello), "'mamba' is not supported"
    yield ("run", "--model", pickled, hello), "pickled"
    yield ("run", "--model", "smollm3", hello), "smollm3"
    yield (*RUN_ARGS, "--speed", "9", hello), "--speed"
    yield (*RUN_ARGS, "--kv-policy", "lru", hello), "full, h2o"
    yield (*RUN_ARGS, "--kv-policy", "h2o", hello), "budget"
    yield (*RUN_ARGS, "--kv-policy", "keyformer:budget=lots", hello), "percentage"
    yield (*RUN_ARGS, "--kv-policy", "keyformer:budget=25%,noise=white", hello), "gumbel"
    yield (*RUN_ARGS, "--kv-policy", "ring:windw=3", hello), "window"
    yield (*RUN_ARGS, "--prefix", "sometimes", hello), "exact"
    yield (*RUN_ARGS, "--prefix", "exact:keep=none", hello), "prompt"
    yield (*RUN_ARGS, "--prefix", "important", hello), "--tier disk"
    yield (*RUN_ARGS, "--prefix", "important:ratio=2", hello), "ratio"
    yield (*RUN_ARGS, "--prefix", "off", "--tier", "ram:capacity=1GB", hello), "off"
    yield (*RUN_ARGS, "--tier", "tape:capacity=1GB", hello), "disk, ram"
    yield (*RUN_ARGS, "--tier", "ram:capacity=lots", hello), "512MiB"
    yield (*RUN_ARGS, "--tier", "ram:capacity=1GB", "--tier", "ram:capacity=2GB", hello), "twice"
    yield (*RUN_ARGS, "--tier", f"disk:path={tmp_path / 'latin.txt'},capacity=1GB", hello), "latin.txt"
    yield (*RUN_ARGS, "--tier", "ram:capacity=1GB,evict=worth", hello), "important"
    yield ("cache", "ls", tmp_path), "no store"
    yield ("cache", "sell", tmp_path), "ls"
    yield (*RUN_ARGS, "--kv-memory", "lots", hello), "512MiB"
    yield (*RUN_ARGS, "--kv-memory", "64KiB", hello), "kv_memory"
    yield (*RUN_ARGS, "--dtype", "float8", hello), "bfloat16"
    yield (*RUN_ARGS, "--weights", "int3", hello), "auto, bf16, int8 or int4"
    yield (*RUN_ARGS, "--weights", "int8", "--dtype", "float32", hello), "float32 everywhere"
    yield (*RUN_ARGS, "--backend", "abacus", hello), "reference"
    yield (*RUN_ARGS[:3], "--temperature", "-1", hello), "temperature"
    yield (*RUN_ARGS[:3], "--top-p", "x", hello), "--top-p"
    yield (*RUN_ARGS[:3], "--max-tokens", "9000", hello), "8192"
    yield (*RUN_ARGS, "-f", tmp_path / "long.txt"), "context"
    yield (*RUN_ARGS, "-f", tmp_path / "nothing.txt"), "nothing.txt"
    yield (*RUN_ARGS, "-f", tmp_path / "latin.txt"), "UTF-8"
    yield (*RUN_ARGS, "-f", tmp_path / "long.txt", hello), "one of them"
    yield (*RUN_ARGS, ""), "empty"
    yield RUN_ARGS, "prompt"
    yield ("run", hello), "--model"
    yield ("bench", "speed", "--model", "smollm2", "--workloads", "short-9"), "short-1"
    yield ("serve",), "--model"
    yield ("chat", "--url", "nowhere"), "http"
    yield ("chat", "--url", "http://127.0.0.1:1/v1"), "refused"
    yield ("chat", "--url", "http://127.0.0.1:1/v1", "--dtype", "float32"), "--dtype"


def test_bad_input_prints_one_line_and_exits_2(capsys, tmp_path):
    for argv, word in bad_inputs(tmp_path):
        code, out, err = run_cli(capsys, *argv)
        assert (code, out) == (2, ""), argv
        assert len(err.strip().splitlines()) == 1 and word in err and "Traceback" not in err, (argv, err)


def test_bench_speed_prints_json_lines(capsys, monkeypatch):
    from retain.bench import speed

    monkeypatch.setattr(speed, "WORKLOADS", (speed.Workload("short-1", 20, 3, 2),))
    code, out, _ = run_cli(capsys, "bench", "speed", "--model", "smollm2", "--workloads", "short-1", "--json")
    row = json.loads(out)
    keys = {
        "engine",
        "workload",
        "prompt",
        "new",
        "batch",
        "prefill_s",
        "prefill_tok_s",
        "decode_tok_s",
        "decode_step_ms",
        "read_mb",
        "bandwidth",
        "note",
    }
    assert code == 0 and set(row) == keys and row["decode_tok_s"] > 0


def test_cache_ls_verify_and_clear(capsys, tmp_path):
    file, store = tmp_path / "prompt.txt", tmp_path / "store"
    file.write_text("The capital of France is Paris. " * 30)
    asked = (*RUN_ARGS, "-f", file, "--json", "--tier", f"disk:path={store},capacity=1GB")
    answers = [json.loads(run_cli(capsys, *asked)[1]) for _ in range(2)]
    cached = [a["usage"]["prompt_tokens_details"]["cached_tokens"] for a in answers]
    assert cached[0] == 0 and cached[1] >= 192 and answers[0]["token_ids"] == answers[1]["token_ids"]
    lines = [json.loads(x) for x in run_cli(capsys, "cache", "ls", store, "--json")[1].splitlines()]
    assert sum(x["pages"] for x in lines) * 64 >= cached[1] and all(x["kind"] == "text" for x in lines)
    code, out, _ = run_cli(capsys, "cache", "ls", store)
    assert code == 0 and "pages 0-" in out and "MiB" in out.splitlines()[-1]
    assert "all whole" in run_cli(capsys, "cache", "verify", store)[1]
    damaged = store / f"{lines[0]['span']}.kv"
    damaged.write_bytes(damaged.read_bytes()[:-4096] + bytes(4096))
    code, out, _ = run_cli(capsys, "cache", "verify", store)
    assert code == 1 and "1 were damaged" in out
    code, _, err = run_cli(capsys, *asked, "--speculate", "draft:model=gemma3")
    assert code == 2 and "vocabulary" in err
    other = StoreIndex(store)  # an engine that could not be holds nothing
    code, out, err = run_cli(capsys, *asked)
    assert code == 2 and "in use" in err and len(err.strip().splitlines()) == 1
    other.close()
    assert run_cli(capsys, "cache", "clear", store)[0] == 0
    assert run_cli(capsys, "cache", "ls", store)[1].startswith("0 spans")
