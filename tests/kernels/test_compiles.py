"""Machines without a GPU compile the Triton kernels, and machines without Triton run everything else."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from retain.kernels import triton

WITHOUT_TRITON_SCRIPT = """
import sys
sys.modules["triton"] = None
from retain import LLM, SamplingParams, kernels
answer = LLM("random:tiny").generate("hello", SamplingParams(max_tokens=3, temperature=0, ignore_eos=True))[0]
assert len(answer.token_ids) == 3 and "not installed" in kernels.import_backend("triton").unavailable_reason()
"""

GPU_TOOL = Path(__file__).parents[2] / "tools" / "gpu.py"


@pytest.mark.slow
@pytest.mark.skipif(not triton.is_interpreted(), reason="a GPU compiles what it runs")
def test_kernels_compile_without_a_gpu() -> None:
    """Triton keeps what it compiled, by the sources: only kernels that changed since the last run take long."""
    env = {**os.environ, "TRITON_INTERPRET": "0"}
    run = subprocess.run([sys.executable, str(GPU_TOOL), "compile", "--quick"], env=env, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-2000:]
    lines = [json.loads(line) for line in run.stdout.splitlines()]
    kernels = {line["kernel"] for line in lines}
    assert kernels >= {
        "attention_decode",
        "attention_prefill",
        "merge_splits",
        "accumulate_mass",
        "recompute_mass",
        "write",
        "copy",
        "select_victims",
        "punch",
        "norm",
        "activation",
        "rope",
        "grouped_linear",
        "mix_choices",
        "multiply_packed",
        "multiply_packed_experts",
        "add_splits",
        "unpack_rows",
        "convolve",
        "attend_linearly",
        "write_keys",
        "map_slots",
        "insert_pending_tokens",
        "summarize_groups",
        "score_sketches",
        "rank_slots",
        "choose_slots",
        "gather_slots",
        "attend_to_means",
    }
    assert {line["PART"] for line in lines if line["kernel"] == "attention_prefill"} == {0, 1, 2}
    assert any(line["DEMOTED_S"] for line in lines if line["kernel"] == "merge_splits")
    with_products = (
        "attention_decode",
        "attention_prefill",
        "recompute_mass",
        "attend_linearly",
        "multiply_packed",
        "multiply_packed_experts",
        "score_sketches",
        "attend_to_means",
    )
    assert all(line["mma"] for line in lines if line["kernel"] in with_products), "products without tensor cores"
    not_fused = ("write", "convolve", "attend_linearly")
    assert not any(line["fused"] for line in lines if line["kernel"] in not_fused), "rounded once, not twice"
    decode = [line for line in lines if line["kernel"] == "attention_decode"]
    assert all(line["block"] and line["spills"] <= 32 for line in decode)
    # Instructions for 64 slots of a pool, by the dtypes of K and V as kernels see them, of one token of Llama's heads.
    most = {
        ("bfloat16", "bfloat16"): 1150, ("int8", "int16"): 1200, ("int8", "uint8"): 1750, ("uint8", "uint8"): 2200,
        ("uint16", "uint16"): 1350,
    }  # fmt: skip
    of_llama = [
        line for line in decode if line["D"] == 128 and line["S"] > 1 and line["M"] == 8 and not line["UPDATE_MASS"]
    ]
    assert {(line["k"], line["v"]) for line in of_llama} == most.keys()
    assert all(line["block"] * line["num_warps"] <= most[line["k"], line["v"]] for line in of_llama)
    assert {line["NOISE_COLUMNS"] for line in lines if line["kernel"] == "attention_prefill"} == {0, 16, 32}
    packed = [line for line in lines if line["kernel"].startswith("multiply_packed")]
    assert {line["FORMAT"] for line in packed} == {"int4", "e2m1"}  # the others: tools/gpu.py compile
    assert not any(line["spills"] for line in packed)
    assert all(line["registers"] <= (144 if line["TOKENS"] == 16 else 192) for line in packed)
    assert all(line["async copies"] >= 48 for line in packed), "loads that wait in each step"
    # REDUX under a condition gave wrong numbers on an H200; see docs/log/gpu.md.
    assert not any(line["conditional reductions"] for line in lines)
    # Prompts whose scores have temperatures spill: few policies need them, and smaller blocks change bits of outputs.
    changes_scores = [line for line in lines if line["kernel"] == "attention_prefill" and line["CHANGE"] == 2]
    assert max(line["spills"] for line in lines if line not in changes_scores) <= 64
    assert max(line["spills"] for line in changes_scores) <= 512


def run_compiler(program: str, *args: str, **env: str) -> Any:
    """Run the helper of that name, where kernels are compiled and compute nothing. Returns what it prints."""
    command = [sys.executable, "-m", f"tests.helpers.{program}", *args]
    variables = {**os.environ, "TRITON_INTERPRET": "0", **env}
    run = subprocess.run(command, env=variables, cwd=GPU_TOOL.parents[1], capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr[-2000:]
    return json.loads(run.stdout)


@pytest.mark.slow
def test_runs_without_triton() -> None:
    run = subprocess.run([sys.executable, "-c", WITHOUT_TRITON_SCRIPT], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-2000:]


@pytest.mark.slow
@pytest.mark.skipif(not triton.is_interpreted(), reason="the program that counts must not find a GPU")
@pytest.mark.parametrize("policy", ["full", "keyformer:budget=12,interval=4", "look:slots=12,min=1"])
def test_sizes_of_steps_and_addresses_make_no_variants(policy: str) -> None:
    """A server that has compiled a kernel for some constants never compiles it again, whatever its requests are."""
    counts = run_compiler("compiled_variants", policy)
    assert counts.keys() >= {"norm", "write", "activation"}
    assert not {name: n for name, n in counts.items() if n[0] > n[1]}


@pytest.mark.slow
@pytest.mark.skipif(not triton.is_interpreted(), reason="the program that counts must not find a GPU")
@pytest.mark.parametrize(
    "args",
    [
        ("full;keyformer:budget=50%;sinks:budget=90",),
        ("h2o:budget=100,demote=int4:40", "kv_dtype=int8", "weights=int4"),
        ("knorm:budget=64;snapkv:budget=64", "kv_dtype=fp8", "weights=int8"),
        ("look:slots=20,min=1;full", "kv_dtype=int8"),
    ],
)
def test_all_that_a_server_launches_was_compiled_ahead(args: tuple[str, ...]) -> None:
    """For the requests of its warm-up and others: of all lengths, alone and together, equal ones, with evictions."""
    found = run_compiler("compiled_variants", "--after-warm-up", *args)
    assert found["at_launch"] == {}
    assert found["ahead"].keys() >= {"attention_decode", "attention_prefill", "write", "copy"}


@pytest.mark.slow
@pytest.mark.skipif(not triton.is_interpreted(), reason="the program must not find a GPU")
def test_kernels_are_compiled_ahead_and_kept_for_the_next_start(tmp_path: Path) -> None:
    """A kernel that does not compile ends it with its name, and what is compiled once is read from the disk."""
    for has_cache in (False, True):
        found = run_compiler("compiled_ahead", TRITON_CACHE_DIR=str(tmp_path))
        assert found["hits"] == [has_cache] * 4
        assert [line.partition(",")[0] for line in found["log"]] == ["compiled 4 of 4 kernels"]
        assert found["error"].startswith("kernel broken does not compile: ") and "no_such_name" in found["error"]
        assert found["collects"]
