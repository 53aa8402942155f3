"""What a bad option of a command, an engine or a request is told: one clear line, never a traceback.

Numbers out of their bounds, amounts and texts that are no choice are the laws of test_options.py.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from retain import LLM, SamplingParams
from retain.kv.eviction import policies
from retain.kv.prefix import config as prefix
from retain.kv.stores import tiers
from retain.sampling_params import MAX_STOP_LENGTH
from retain.server.observers.kv_events import config as kv_events
from tests.helpers.cli import assert_one_line_error, run_cli
from tests.helpers.folders import save_tiny_smollm2
from tests.helpers.gguf_files import BYTE_LEVEL_VOCABULARY, tiny_for_gguf, write_gguf

UNREAD = "run hello --model /nowhere"  # the option is refused before the model is looked for
TINY = "--model random:tiny --kv-memory 4MiB"
COMMANDS = [
    # Models and files
    ("run hello", "--model"),
    ("serve", "--model"),
    ("run hello --model FILES/none.gguf", "none.gguf"),
    ("run hello --model FILES/cut.gguf", "damaged"),
    ("run hello --model FILES/header.gguf", "damaged"),
    ("run hello --model FILES/noise.gguf", "GGUF"),
    ("run hello --model FILES/mamba", "'mamba' is not supported"),
    ("run hello --model FILES/pickled", "pickled"),
    ("run hello --model smollm3", "smollm3"),
    (f"run {TINY} -f FILES/long.txt", "context"),
    (f"run {TINY} -f FILES/nothing.txt", "nothing.txt"),
    (f"run {TINY} -f FILES/latin.txt", "UTF-8"),
    (f"run hello {TINY} -f FILES/long.txt", "one of them"),
    (f"run {TINY}", "prompt"),
    (f"run {TINY} ''", "empty"),
    # Engine
    (f"{UNREAD} --speed 9", "--speed"),
    (f"{UNREAD} --log-level loud", "warning"),
    (f"{UNREAD} --kv-memory lots", "512MiB"),
    (f"{UNREAD} --page-size 8", "page_size must be a multiple of 16, not 8"),
    (f"{UNREAD} --dtype float8", "bfloat16"),
    (f"{UNREAD} --kv-dtype float8", "int8"),
    (f"{UNREAD} --weights int3", "auto, bf16, int8 or int4"),
    (f"{UNREAD} --weights int8 --dtype float32", "float32 everywhere"),
    (f"{UNREAD} --backend abacus", "reference"),
    (f"run hello {TINY} --backend cpu --dtype float16", "choose dtype float32 or bfloat16"),
    ("run hello --model random:tiny --kv-memory 1KiB", "kv_memory"),
    # Policies, prefix caches and tiers
    (f"{UNREAD} --kv-policy lru", "full, gate, gate_replay, h2o"),
    (f"{UNREAD} --kv-policy h2o", "budget"),
    (f"{UNREAD} --kv-policy keyformer:budget=lots", "percentage"),
    (f"{UNREAD} --kv-policy keyformer:budget=25%,noise=white", "gumbel"),
    (f"{UNREAD} --kv-policy ring:windw=3", "window"),
    (f"{UNREAD} --prefix-cache sometimes", "exact"),
    (f"{UNREAD} --prefix-cache exact:keep=none", "prompt"),
    (f"run hello {TINY} --prefix-cache selective", "--tier disk"),
    (f"{UNREAD} --prefix-cache selective:ratio=2", "ratio"),
    (f"{UNREAD} --prefix-cache off --tier ram:capacity=1GB", "off"),
    (f"{UNREAD} --tier tape:capacity=1GB", "disk, ram"),
    (f"{UNREAD} --tier ram:capacity=lots", "512MiB"),
    (f"{UNREAD} --tier ram:capacity=1GB --tier ram:capacity=2GB", "twice"),
    (f"run hello {TINY} --tier ram:capacity=1GB,evict=importance", "selective"),
    (f"run hello {TINY} --tier disk:path=FILES/latin.txt,capacity=1GB", "latin.txt"),
    ("cache ls FILES", "no store"),
    ("cache sell FILES", "ls"),
    ("cache sweep FILES", "there is no store at"),
    ("cache ls ram:capacity=1GB", "is no store"),
    # Drafters
    (f"{UNREAD} --speculate guess", "unknown drafter 'guess': choose one of assistant, draft, eagle3, mtp, ngram"),
    (f"{UNREAD} --speculate ngram:k=0", "k must be auto, or at least 1"),
    (f"{UNREAD} --speculate ngram:min=3,max=2", "min must be at most max"),
    (f"{UNREAD} --speculate ngram:n=3", "has no option 'n'"),
    (f"run hello {TINY} --speculate draft:weights=int5", "weights 'int5'"),
    (f"run hello {TINY} --speculate draft", "which model="),
    (f"run hello {TINY} --speculate self:budget=0", "budget"),
    ("run hello --model FILES/tiny --kv-memory 4MiB --speculate draft:model=random:tiny", "another vocabulary"),
    # Sampling
    (f"{UNREAD} --temperature -1", "temperature"),
    (f"{UNREAD} --top-p x", "--top-p"),
    (f"run hello {TINY} --max-tokens 9000", "the context of 2048"),
    # Other commands
    ("chat --url nowhere", "http"),
    ("chat --url http://127.0.0.1:1/v1", "refused"),
    ("chat --url http://127.0.0.1:1/v1 --dtype float32", "--dtype"),
    ("bench speed --model random:tiny --workloads short-9", "short-1"),
    ("bench budget --model random:tiny --speculate ngram", "--speculate is for bench speed"),
    ("bench budget --model random:tiny --measurements colour", "scoring, eviction, decode, throughput"),
    ("bench budget --model random:tiny --kv-policy full", "--kv-policy is for bench speed"),
    ("bench precision --policies ''", "name at least one"),
    ("bench precision --model random:tiny --measurements speed", "unknown measurement 'speed'"),
    ("bench precision --model random:tiny --kv-dtype int8", "name them by --kv-dtypes"),
    ("bench prefix --model random:tiny --workloads copa,chess", "unknown workload 'chess'"),
    ("bench prefix --model random:tiny --prefix-cache off", "bench prefix sets it itself"),
    (f"bench prefix {TINY} --data-dir /nowhere", "no such file"),
    ("bench quality --model random:tiny --speculate ngram", "--speculate is for bench speed"),
    ("bench quality --model random:tiny --tasks chess", "unknown task 'chess'"),
    ("bench quality --model random:tiny --policies lru", "unknown KV policy"),
    ("bench quality --model random:tiny --policies auto:window=3", "has no option 'window'"),
    ("bench quality --model random:tiny --budgets x", "percentage"),
    ("bench quality --model random:tiny --budgets 0%", "must be above 0%"),
    ("bench quality --model random:tiny --kv-policy full", "--kv-policy is for bench speed"),
    (f"bench quality {TINY} --data-dir /nowhere", "no such file"),
    ("bench speculate --model random:tiny --speculate ngram", "--drafters"),
    ("bench speculate --model random:tiny --workloads poems", "unknown workload 'poems'"),
    ("bench speculate --model random:tiny --context-lens many", "'many' should be an integer"),
    ("bench speculate --model random:tiny --drafters x", "unknown drafter"),
    ("cluster up --model random:tiny --affinity ip", "affinity is session or none"),
    ("cluster up --model random:tiny --port 0", "--port 0 is for retain serve"),
    ("cluster up --model random:tiny --replicas 2 --inspect", "--inspect"),
    ("cluster up --model random:tiny --replicas 2 --tier disk:path=store,capacity=1GiB", "{replica}"),
    ("cluster up --model random:tiny --host 0.0.0.0", "--insecure-no-api-key"),
    ("cluster up --model random:tiny --max-connections 7", "unrecognized arguments"),
    ("tune --model random:tiny --data FILES/long.txt --within kl=1%", "not a bound such as"),
    ("tune --model random:tiny --data FILES/long.txt --within speed=2", "not a bound such as"),
    ("tune --model random:tiny --data FILES/long.txt --within top1=1.5", "not a bound such as"),
    ("tune --model random:tiny --data FILES/long.txt --within kl=0.1 --kv-policy h2o:budget=9", "--policies"),
    ("tune --model random:tiny --data FILES/long.txt --within kl=0.1 --policies lru", "unknown KV policy"),
    ("tune --model random:tiny --data FILES/long.txt --within kl=0.1 --budgets x", "percentage"),
    ("tune --model random:tiny --data nowhere.jsonl --within kl=0.1", "no such file"),
    ("serve --model /nowhere --kv-events tcp://*:5557", "kv-events"),
]  # fmt: skip


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of models and texts that are damaged, unknown or too long, and of a tiny model."""
    folder = tmp_path_factory.mktemp("files")
    whole = write_gguf(folder / "whole.gguf", tiny_for_gguf("qwen3"), vocabulary=BYTE_LEVEL_VOCABULARY).read_bytes()
    (folder / "cut.gguf").write_bytes(whole[: len(whole) // 2])
    (folder / "header.gguf").write_bytes(whole[:1000])
    (folder / "noise.gguf").write_bytes(b"\x00noise" * 1000)
    (folder / "latin.txt").write_bytes(b"caf\xe9")
    (folder / "long.txt").write_text("word " * 9000)
    for name in ("mamba", "pickled", "tiny"):
        (folder / name).mkdir()
    (folder / "mamba" / "config.json").write_text('{"model_type": "mamba"}')
    save_file({"x": torch.zeros(2)}, folder / "mamba" / "model.safetensors")
    (folder / "pickled" / "config.json").write_text('{"model_type": "llama"}')
    torch.save({}, folder / "pickled" / "pytorch_model.bin")
    save_tiny_smollm2(folder / "tiny")
    return folder


@pytest.mark.checked_cases(len(COMMANDS))
@pytest.mark.usefixtures("shared_engines")
@pytest.mark.parametrize(("command", "message"), COMMANDS)
def test_a_command_refuses_a_bad_option(
    command: str, message: str, files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert_one_line_error(run_cli(capsys, *shlex.split(command.replace("FILES", str(files)))), message)


TINY_ENGINE = {"model": "random:tiny", "kv_memory": "2MiB"}
ENGINES: list[tuple[dict[str, Any], str]] = [
    ({"colour": 1}, "unknown option 'colour'"),
    ({"kv_memory": "x"}, "'x' is not a size"),
    ({"dtype": "int4"}, "dtype 'int4' is not supported"),
    ({"kv_dtype": "float8"}, "choose auto, bfloat16, int8, k8v4, int4, fp8"),
    ({"pooling": "cls"}, "pooling 'cls' is not supported: choose auto, off, last, mean"),
    ({"max_batched_tokens": 8}, "must exceed max_running_requests"),
    ({"kv_policy": "auto"}, "needs budget"),
    ({"kv_policy": "auto:budget=0"}, "budget must be at least 1"),
    ({"kv_policy": "auto:window=7"}, "has no option 'window'"),
    ({"kv_policy": "auto:budget=5,budget=6"}, "each key once"),
    ({"prompt_activations": "int4"}, "prompt_activations 'int4' is not supported: choose int8, bfloat16"),
    ({"prompt_activations": "bfloat16", "dtype": "float32"}, "prompt_activations bfloat16 is for quantized weights"),
    ({"prompt_activations": "bfloat16", "weights": "bf16"}, "prompt_activations bfloat16 is for quantized weights"),
    ({"prompt_activations": "bfloat16", "backend": "reference"}, "is for the cpu backend: reference has"),
    ({"speculate": "self:dtype=foo"}, "self: dtype is auto, int4, k8v4 or int8, not 'foo'"),
    ({**TINY_ENGINE, "max_model_len": 10**6}, "longer than the model's own context, 2048"),
    ({**TINY_ENGINE, "backend": "cpu", "kv_dtype": "fp8"}, "has no slots in fp8: use backend reference or triton"),
    ({**TINY_ENGINE, "backend": "cpu", "page_size": 512, "kv_dtype": "int8"}, "page_size"),
    ({**TINY_ENGINE, "speculate": "self:dtype=int4", "kv_dtype": "int4"}, "dtype=int4 saves no memory"),
    ({**TINY_ENGINE, "speculate": "self:dtype=int8", "kv_dtype": "k8v4"}, "dtype=int8 saves no memory"),
    ({**TINY_ENGINE, "kv_dtype": "k8v4", "kv_policy": "h2o:budget=25%,demote=int4:50%"}, "in a cache of 4 bits"),
    ({**TINY_ENGINE, "kv_dtype": "int4", "allow_policy": "sinks:budget=20,demote=int4"}, "in a cache of 4 bits"),
]


@pytest.mark.checked_cases(len(ENGINES))
@pytest.mark.parametrize(("options", "message"), ENGINES)
def test_an_engine_refuses_a_bad_option(options: dict[str, Any], message: str) -> None:
    assert_one_line(message, lambda: LLM(**{"model": "/nowhere"} | options))


SAMPLING: list[tuple[dict[str, Any], str]] = [
    ({"stop": ""}, "stop"),
    ({"stop": "a" * (MAX_STOP_LENGTH + 1)}, f"have {MAX_STOP_LENGTH + 1} characters together: at most"),
    ({"stop": ["a" * MAX_STOP_LENGTH, "b"]}, f"have {MAX_STOP_LENGTH + 1} characters together: at most"),
    ({"logit_bias": ((5, 1e39),)}, "logit_bias"),
    ({"logit_bias": ((5, math.nan),)}, "logit_bias"),
    ({"max_tokens": 2, "min_tokens": 3}, "min_tokens is 3: at most max_tokens, which is 2"),
]


@pytest.mark.checked_cases(len(SAMPLING))
@pytest.mark.parametrize(("params", "message"), SAMPLING)
def test_a_request_refuses_a_bad_parameter(params: dict[str, Any], message: str) -> None:
    assert_one_line(message, lambda: SamplingParams(**params))


SPECS: list[tuple[Callable[[str], Any], str, str]] = [
    (policies.parse, "", "unknown KV policy"),
    (policies.parse, "ring", "needs window"),
    (policies.parse, "ring:size=3", "no option 'size'"),
    (policies.parse, "ring:window", "'window' should be key=value"),
    (policies.parse, "ring:window=x", "window"),
    (policies.parse, "ring:window=2,window=3", "each key once"),
    (policies.parse, "full:x=1", "full has no option 'x'"),
    (policies.parse, "full:prefill=stream", "full has no option 'prefill'"),
    (policies.parse, "full:demote=int4:50%", "full has no option 'demote'"),
    (policies.parse, "h2o", "needs budget"),
    (policies.parse, "h2o:budget=10,prompt=5", "no option 'prompt'"),
    (policies.parse, "h2o:budget=10,positions=new", "no option 'positions'"),
    (policies.parse, "h2o:budget=10,modes=stream", "no option 'modes'"),
    (policies.parse, "h2o:budget=10,prompt_len=3", "no option 'prompt_len'"),
    (policies.parse, "h2o:budget=10,prefill=layers", "prefill=stream"),
    (policies.parse, "h2o:budget=10,share=layer,prefill=stream", "prefill"),
    (policies.parse, "h2o:budget=10,share=layer,heads=union", "heads"),
    (policies.parse, "h2o:budget=10,share=all,scope=shared", "scope"),
    (policies.parse, "window:budget=10,value=norm", "no option 'value'"),
    (policies.parse, "random:budget=10,keep=me", "keep is any or prompt"),
    (policies.parse, "reread:budget=10,mix=tova", "mix"),
    (policies.parse, "reread:budget=10,prefill=stream", "prefill"),
    (policies.parse, "keyformer:budget=10,tau=0", "tau"),
    (policies.parse, "keyformer:budget=10,tau=a..b", "tau"),
    (policies.parse, "keyformer:budget=10,tau=nan", "tau"),
    (policies.parse, "h2o:budget=25%,demote=int8:50%", "should be int4, or int4 and an amount"),
    (policies.parse, "h2o:budget=25%,demote=int4:", "should be int4, or int4 and an amount"),
    (policies.parse, "h2o:budget=25%,demote=int4:50%,shrink=10%", "demote does not go with"),
    (policies.parse, "h2o:budget=25%,demote=int4:50%,heads=union", "not with heads=union"),
    (prefix.parse, "selective:size=3", "selective"),
    (prefix.parse, "selective:ratio=x", "selective"),
    (tiers.parse, "tape", "choose one of disk, ram"),
    (tiers.parse, "ram", "needs capacity"),
    (tiers.parse, "disk:path=x", "needs capacity"),
    (tiers.parse, "ram:capacity=lots", "not a size"),
    (tiers.parse, "ram:capacity=1GB,evict=fifo", "evict is lru, lfu or importance"),
    (tiers.parse, "disk:path=x,capacity=1GB,evict=importance", "evict is lru or lfu"),
    (tiers.parse, "ram:capacity=1GB,path=x", "no option 'path'"),
    (tiers.parse, "remote", "remote needs url=..."),
    (tiers.parse, "remote:capacity=1GB", "remote has no option 'capacity'"),
    *((kv_events.parse, spec, "kv-events") for spec in (
        "tcp://0.0.0.0:5557", "tcp://10.0.0.7:5557,insecure=no", "5557", "tcp://127.0.0.1", "tcp://127.0.0.1:65535",
        "tcp://127.0.0.1:5557/x", "http://127.0.0.1:5557", "tcp://127.0.0.1:5557,port=3",
        "tcp://127.0.0.1:5557,insecure=maybe",
    )),
]  # fmt: skip


@pytest.mark.checked_cases(len(SPECS))
@pytest.mark.parametrize(("parse", "spec", "message"), SPECS)
def test_a_spec_with_a_bad_option_is_refused(parse: Callable[[str], Any], spec: str, message: str) -> None:
    assert_one_line(message, lambda: parse(spec))


def assert_one_line(message: str, call: Callable[[], object]) -> None:
    """The call raises ValueError, with one line that contains the message."""
    with pytest.raises(ValueError) as error:
        call()
    assert message in str(error.value) and "\n" not in str(error.value)
