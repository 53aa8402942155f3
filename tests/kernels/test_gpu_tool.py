"""tools/gpu.py: every part runs on tiny shapes, without a GPU in Triton's interpreter; a bad part stops no other."""

from __future__ import annotations

import json
import subprocess
import sys
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from retain.kernels import triton
from tools.gpu import MODEL_PARTS, ROOT, end_cut_line, lines_of
from tools.gpu_bench import library_prompts
from tools.gpu_bench.all_parts import KERNEL_PARTS, Part, list_parts, read_lines, run_all, run_part
from tools.gpu_bench.attention import compare_attention
from tools.gpu_bench.cases import make_inputs
from tools.gpu_bench.library_prompts import compare_library_prompts
from tools.gpu_bench.models import ModelBench, bench_decode
from tools.gpu_bench.timing import KernelBench, Line, check

ON_CPU = Namespace(
    device="cpu",
    quick=True,
    compile_only=False,
    model="random:tiny",
    kv_memory="1MiB",
    kv_dtype="auto",
    input_len=128,
    output_len=512,
    speculate_input_len=256,
    skip_done=None,
)
DEVICE = "cpu" if triton.is_interpreted() else "cuda"


def assert_measured(lines: list[Line]) -> None:
    """Something was timed, and nothing failed or was wrong."""
    assert any({"us", "wall_ms", "tok_s"} & {*line} for line in lines)
    assert not [line for line in lines if {"error", "wrong"} & {*line}]


@pytest.mark.slow
@pytest.mark.skipif(triton.unavailable_reason() is not None, reason="needs Triton")
@pytest.mark.parametrize("name", KERNEL_PARTS)
def test_kernels_are_compared_and_timed(name: str) -> None:
    lines = list(lines_of(name, Namespace(**{**vars(ON_CPU), "device": DEVICE})))
    assert_measured(lines)
    compared = [line["differences"] for line in lines if "differences" in line]
    assert compared or name == "mass"  # whose kernels are those of pools


@pytest.mark.parametrize("name", MODEL_PARTS[:3])
def test_models_are_timed(name: str) -> None:
    assert_measured(list(lines_of(name, ON_CPU)))


def test_a_wrong_kernel_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = KernelBench(torch.device(DEVICE), quick=True)
    inputs = make_inputs((2, 1, 32), 64, 1, torch.bfloat16, bench.device)
    assert "wrong" not in check(lambda: compare_attention(bench, inputs, None))
    from retain.kernels.triton import attention

    right = attention.attend
    monkeypatch.setattr(attention, "attend", lambda *args: right(*args) * 1.05)
    assert check(lambda: compare_attention(bench, inputs, None))["wrong"]
    assert check(lambda: [0.001, float("nan")])["wrong"]
    assert check(lambda: [1 / 0])["error"] == "ZeroDivisionError: division by zero"


def test_the_library_is_asked_for_its_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels that a device lacks are named. One whose rows know how many there are is seen."""
    bench = KernelBench(torch.device(DEVICE), quick=True)
    lines = {line["kernel"]: line for line in compare_library_prompts(bench, (4, 2, 32), 256)}
    assert [*lines] == ["cudnn", "flash", "efficient", "math"]
    assert all(("unavailable" in line) != ("equal beside" in line) for line in lines.values())
    measured = [line for line in lines.values() if "cuts" in line]
    assert measured and all(line["tflop_s"] > 0 for line in measured)
    assert all({*line["equal before"], *line.get("equal behind", ())} <= {*line["cuts"]} for line in measured)
    assert any("equal behind" in line for line in measured)
    q = torch.randn(2, 2, 64, 8)
    monkeypatch.setattr(library_prompts, "causal", lambda q, k, v: q * 2)
    assert library_prompts.compare_bits(q, q, q, [9])["equal before"] == [9]
    monkeypatch.setattr(library_prompts, "causal", lambda q, k, v: q * q.shape[2] + q.shape[0])
    found = library_prompts.compare_bits(q, q, q, [9])
    assert found["equal before"] == [] and not found["equal beside"]


def test_one_failing_kernel_stops_no_other() -> None:
    def fail() -> None:
        raise RuntimeError("out of\nresources")

    lines = KernelBench(torch.device(DEVICE), quick=True).time({"bad": fail, "good": lambda: None})
    assert lines["bad"] == {"error": "RuntimeError: out of resources"}
    assert "us" in lines["good"]


def test_every_bench_is_a_part_of_all() -> None:
    parts = list_parts(["gpu.py"], "cuda", "random:tiny", quick=False)
    tests = ["failed-tests", "tests", "other-tests"]
    assert [*parts][:3] == tests
    assert {part.command[-1] for name, part in parts.items() if name not in tests} == {*KERNEL_PARTS, *MODEL_PARTS}
    files = [path.partition("::")[0] for name in tests for path in parts[name].command if path.startswith("tests/")]
    assert len({*files}) == len(files) - 2, "the files of tests that failed are there twice"
    assert all((ROOT / file).is_file() for file in files)
    assert sum(part.limit for part in parts.values()) <= 3 * 285, "three calls of five minutes run all"


def python(code: str) -> list[str]:
    return [sys.executable, "-u", "-c", code]


def test_a_part_that_hangs_keeps_its_lines() -> None:
    code = """
import json, subprocess, sys, time
print(json.dumps({"us": 1.0}), flush=True)
print("a warning", flush=True)
subprocess.run([sys.executable, "-c", "import time; time.sleep(1000)"])
"""
    first, last = run_part("hangs", python(code), 2.0)
    assert first == {"part": "hangs", "us": 1.0}
    assert last["exit"] and last["limit"] == 2.0 and last["tail"] == ["a warning"]


@pytest.mark.slow
def test_failed_tests_have_a_line_each(tmp_path: Path) -> None:
    folder = tmp_path / "tests"
    folder.mkdir()
    (folder / "test_it.py").write_text("def test_a():\n    assert 1 == 2\n\ndef test_b():\n    pass\n")
    command = [sys.executable, "-m", "pytest", "-vv", "--tb=no", "-rfE", "-p", "no:cacheprovider", "--rootdir", "."]
    (first, last) = run_part("tests", ["env", "-C", str(tmp_path), *command, "tests/test_it.py"], 60)
    assert first["failed"] == "tests/test_it.py::test_a" and "1 == 2" in first["message"]
    assert last["exit"] == 1 and "1 failed, 1 passed" in last["tail"][-1]


def test_failures_are_explained_before_a_run_ends(tmp_path: Path) -> None:
    """A run that is cut has no summary. The part's own command, with a test that hangs behind one that fails."""
    folder = tmp_path / "tests"
    folder.mkdir()
    code = "import time\n\ndef test_triton_a():\n    assert 1 == 2\n\ndef test_triton_b():\n    time.sleep(1000)\n"
    (folder / "test_it.py").write_text(code)
    own = list_parts(["gpu.py"], "cuda", "random:tiny", quick=False)["tests"].command
    command = [str(tmp_path) if x == str(ROOT) else x for x in own if not x.startswith("tests/")]
    at = command.index("-n")
    options = [*command[:at], "-n", "2", *command[at + 2 :], "-p", "no:cacheprovider", "--rootdir", str(tmp_path)]
    lines = run_part("tests", ["env", f"PYTHONPATH={ROOT}", *options, "tests/test_it.py"], 200.0)
    first = next(lines)
    lines.close()
    assert first["failed"] == "tests/test_it.py::test_triton_a" and "1 == 2" in first["message"]


def test_what_comes_after_the_limit_of_all_is_left_out() -> None:
    parts = list_parts(["gpu.py"], "cpu", "random:tiny", quick=True)
    lines = list(run_all(parts, 0.0, ["evict", "step"]))
    assert [line["part"] for line in lines if "left out" in line] == ["evict", "step"]
    with pytest.raises(SystemExit, match="no part 'nothing'"):
        list(run_all(parts, 0.0, ["nothing"]))


def test_calls_go_on_where_the_call_before_ended(tmp_path: Path) -> None:
    """A part begins only where its limit is left. One that was cut is run again where it resumes."""
    file = tmp_path / "lines.jsonl"
    parts = {
        "long": Part(python("print('{}')"), 1000.0),
        "short": Part(python("print('{}')"), 5.0),
        "hangs": Part(python("import time; time.sleep(1000)"), 1.0),
        "fails": Part(python("raise ValueError"), 5.0),
        "resumes": Part(python("import time; time.sleep(1000)"), 1.0, resumes=True),
    }

    def call(seconds: float) -> list[str]:
        lines = list(run_all(parts, seconds, None, read_lines(file)))
        end_cut_line(str(file))
        with file.open("a") as f:
            f.writelines(json.dumps(line) + "\n" for line in lines)
            f.write('{"cut')
        return [line["part"] for line in lines if "exit" in line]

    assert read_lines(file) == []
    assert call(50.0) == ["short", "hangs", "fails", "resumes"]
    assert call(2000.0) == ["long", "fails", "resumes"]
    assert call(0.0) == []
    assert {line.get("part") for line in read_lines(file)} == {*parts}


def test_budgets_that_were_timed_are_left_out() -> None:
    bench = ModelBench("random:tiny", "cpu", "1MiB", 2, 1)
    lines = list(bench_decode(bench, 128, 512))
    full = [line for line in lines if line["policy"] == "full"]
    some = [line for line in lines if line["policy"] in ("full", "keyformer:budget=50%")]
    again = list(bench_decode(bench, 128, 512, some))
    assert [(x["policy"], x["batch"]) for x in [*some, *again]] == [(x["policy"], x["batch"]) for x in lines]
    half = [line for line in lines if line["policy"] == "keyformer:budget=50%" and line["depth"] == 1]
    assert "keyformer:budget=50%" in {x["policy"] for x in bench_decode(bench, 128, 512, [*full, *half, *half])}
    speeds = {(x["batch"], x["depth"]): x["tok_s"] for x in full}
    assert all(x["speedup_over_full"] == x["tok_s"] / speeds[1, x["depth"]] for x in again if x["batch"] == 1)


@pytest.mark.slow
@pytest.mark.skipif(triton.unavailable_reason() is not None, reason="needs Triton")
def test_the_command_runs_the_chosen_parts(tmp_path: Path) -> None:
    file = tmp_path / "lines.jsonl"
    command = [sys.executable, str(ROOT / "tools" / "gpu.py"), "all", "--quick", "--device", "cpu"]
    command += ["--parts", "peer,evict", "--seconds", "1000"]
    run = subprocess.run(
        [*command, "--model", "random:tiny", "--out", str(file)], capture_output=True, text=True, cwd=tmp_path
    )
    assert run.returncode == 0, run.stderr[-2000:]
    lines: list[dict[str, Any]] = [json.loads(line) for line in run.stdout.splitlines()]
    assert [json.loads(line) for line in file.read_text().splitlines()] == lines
    assert [(line["part"], line["exit"]) for line in lines if "exit" in line] == [
        ("peer", 0),
        ("evict", 0),
    ]
    assert_measured(lines)


class FakeGPU:
    """A device whose launches take a millisecond by its own clock, which events read."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.clock = 0.0
        gpu = self

        class Graph:
            launches = 0.0

            def replay(self) -> None:
                gpu.clock += self.launches

        class Event:
            time = 0.0

            def __init__(self, enable_timing: bool):
                assert enable_timing

            def record(self) -> None:
                self.time = gpu.clock

            def synchronize(self) -> None:
                pass

            def elapsed_time(self, end: Event) -> float:
                return end.time - self.time

        @contextmanager
        def capture(graph: Graph) -> Iterator[None]:
            started = gpu.clock
            yield
            graph.launches = gpu.clock - started

        monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "graph", capture)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)

    def launch(self) -> None:
        self.clock += 1.0


def test_what_no_graph_can_hold_is_timed_by_the_profiler(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = FakeGPU(monkeypatch)
    calls: list[None] = []

    def upload() -> None:
        calls.append(None)
        if len(calls) == 2:
            raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr("tools.gpu_bench.timing.kernel_ms", lambda function, repeats: 7.0)
    lines = KernelBench(torch.device("cuda")).time({"kernel": gpu.launch, "upload": upload})
    assert lines["kernel"] == {"us": 1000.0, "timed_by": "graph"}
    assert lines["upload"]["us"] == 7000.0
    assert lines["upload"]["timed_by"] == "profiler"
    assert "not permitted" in lines["upload"]["not captured"]


def test_without_a_profiler_events_time_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = FakeGPU(monkeypatch)

    def fail(function: object, repeats: int) -> float:
        raise RuntimeError("no profiler")

    monkeypatch.setattr("tools.gpu_bench.timing.kernel_ms", fail)
    lines = KernelBench(torch.device("cuda")).time({"kernel": gpu.launch}, in_graphs=False)
    assert lines == {"kernel": {"us": 1000.0, "timed_by": "events"}}


def test_a_first_process_only_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = FakeGPU(monkeypatch)
    assert KernelBench(torch.device("cuda"), compile_only=True).time({"kernel": gpu.launch}) == {"kernel": {}}
    assert gpu.clock == 1.0
