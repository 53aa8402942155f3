"""The laws in small on another device: the triton backend on a fake device (tests/helpers/fake_device.py).

Tokens equal the reference's, and the host waits for nothing but tokens. On a GPU the same tests run on the GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from retain import LLM, kernels
from retain.engine import drafters
from retain.engine.engine import Engine
from retain.engine.request import Request
from retain.kernels import triton
from retain.processing.grammar import grammar_from_lark
from retain.processing.input import GenerateRequest
from retain.sampling_params import SamplingParams
from tests.helpers.engines import make_engine, make_request, run_to_completion
from tests.helpers.overlap import STOPPED, assert_tokens_equal, overlapped_requests, run_overlapped
from tests.helpers.tiers import clear_pool, disk_spec, offloader_of

pytestmark = pytest.mark.skipif(triton.unavailable_reason() is not None, reason=str(triton.unavailable_reason()))
GREEDY = SamplingParams(temperature=0, ignore_eos=True, seed=3)
# Their best two logits are 0.13 apart or more, so that other roundings of a GPU choose no other token of int4 slots.
PROMPTS = [list(range(11, 11 + n)) for n in (17, 7, 20)]
slow = pytest.mark.slow
TOKEN_SYNC = "tokens_to_host"  # the function that waits for a step's tokens
MakeEngine = Callable[..., Engine]


def on_device(work: Callable[[MakeEngine], Any]) -> tuple[Any, list[str]]:
    """The result of `work` with engines on the device, and where the host waited for anything but tokens."""
    if not triton.is_interpreted():
        return work(
            lambda family, **more: make_engine(family, backend="triton", device=torch.device("cuda"), **more)
        ), []
    from tests.helpers.fake_device import DEVICE, FakeDevice

    def make_device_engine(family: str, **more: Any) -> Engine:
        with device.allow_syncs():  # loading weights may wait
            return make_engine(family, backend="triton", device=DEVICE, **more)

    with FakeDevice() as device:
        result = work(make_device_engine)
    return result, [sync for sync in device.host_syncs if TOKEN_SYNC not in sync]


def run_requests(engine: Engine, requests: Sequence[Request]) -> list[list[int]]:
    """The answers. The accounts are checked at the end only, because reading them after every step takes long."""
    engine.add(*requests)
    while engine.has_unfinished_requests:
        engine.step()
    engine.cache.check()
    return [r.output_tokens for r in requests]


def assert_matches_reference(
    family: str,
    policies: Sequence[str],
    params: SamplingParams = GREEDY,
    may_wait: Set[str] | None = frozenset(),
    **options: Any,
) -> None:
    """Compare three requests, run together, with the reference backend. `may_wait`: functions, or None for all."""

    def make_requests() -> list[Request]:
        return [make_request(prompt, 3, policy, params) for prompt, policy in zip(PROMPTS, policies, strict=True)]

    expected = run_to_completion(make_engine(family, backend="reference", **options), make_requests())
    tokens, syncs = on_device(lambda make: run_requests(make(family, **options), make_requests()))
    assert tokens == expected
    assert may_wait is None or {sync.split()[1] for sync in syncs} <= may_wait, syncs


@pytest.mark.parametrize("family", ["gemma3_text", pytest.param("mpt", marks=slow)])
def test_families(family: str) -> None:
    assert_matches_reference(family, ["full", "sinks:budget=12,interval=2", "ring:window=10"])


@pytest.mark.parametrize(
    "policies",
    [
        pytest.param(
            ["h2o:budget=12,interval=2", "keyformer:budget=6,interval=1", "snapkv:budget=6,interval=2"], marks=slow
        ),
        pytest.param(
            ["tova:budget=9,interval=2,prefill=stream,chunk=8", "knorm:budget=6", "reread:budget=12"], marks=slow
        ),
        ["random:budget=10", "dilated:budget=6,interval=2", "keydiff:budget=10"],
    ],
)
def test_policies(policies: list[str]) -> None:
    assert_matches_reference("llama", policies)


@pytest.mark.slow
@pytest.mark.parametrize(
    "kv_dtype", [torch.int4, pytest.param(torch.int8, marks=slow), torch.uint8, torch.float8_e4m3fn]
)
def test_quantized_slots(kv_dtype: torch.dtype) -> None:
    assert_matches_reference("llama", ["full", "h2o:budget=12,interval=2", "ring:window=10"], kv_dtype=kv_dtype)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "weights"),
    [("llama", "int4"), pytest.param("llama", "int8", marks=slow), pytest.param("qwen3_moe", "int4", marks=slow)],
)
def test_quantized_weights(family: str, weights: str) -> None:
    assert_matches_reference(family, ["full", "h2o:budget=12,interval=2", "ring:window=10"], weights=weights)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("policies", "kv_dtype", "waits"),
    [
        (["h2o:budget=12,interval=2,demote=int4:4", "full", "knorm:budget=6,demote=int4:20"], torch.float32, False),
        pytest.param(
            ["gate:budget=9,interval=2,demote=int4:20", "h2o:budget=6,share=all,demote=int4:9", "full"],
            torch.int8,
            True,
            marks=slow,
        ),
    ],
)
def test_demotion(policies: list[str], kv_dtype: torch.dtype, waits: bool) -> None:
    """The statistics of a request that ends count its demoted tokens, and wait for that."""
    may_wait = None if waits else {"num_tokens:"}
    assert_matches_reference("llama", policies, may_wait=may_wait, demotes=True, kv_dtype=kv_dtype)


def test_demoted_tables_follow_their_rows() -> None:
    """A row that is closed leaves no page behind for the row's next request."""

    def run(make: MakeEngine) -> list[tuple[list[int], int | None]]:
        cache, found = make("llama", demotes=True).cache, []
        t, row, layers = cache.tables.demoted, 3, np.array([0, 1], np.int32)
        assert t
        for change in (lambda: t.allocate(row, layers, np.array([[1, 2], [3, 4]], np.int32)), lambda: t.clear(row)):
            change()
            tables = cache.tables.on_device.build_tables(torch.tensor([row, 5]), torch.arange(3)).demoted
            assert tables and int((tables.pages[:2, row] > 0).sum()) == 10
            found.append((tables.counts[:2, row].flatten().tolist(), tables.max_pages))
        return found

    assert on_device(run)[0] == [([1, 2, 3, 4], 4), ([0, 0, 0, 0], 0)]


@slow
def test_chunks_and_preemption() -> None:
    policies = ["full", "h2o:budget=12,interval=2", "ring:window=10"]
    assert_matches_reference("llama", policies, num_pages=30, max_batched_tokens=16, max_running_requests=4)


@pytest.mark.slow
@pytest.mark.skipif(not triton.is_interpreted(), reason="a GPU counts no uploads")
def test_rows_that_the_backend_ranks_are_evicted_by_one_launch_and_one_upload(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing waits, and tables that have not changed stay where they are."""
    from tests.helpers.fake_device import DEVICE, FakeDevice

    specs = ["h2o:budget=5,interval=2", "sinks:budget=6,interval=2", "keyformer:budget=4,interval=2"]
    evictions: list[tuple[int, int, list[str]]] = []  # of rows that have evicted before: rows, uploads, launches
    with FakeDevice() as device:
        with device.allow_syncs():
            engine = make_engine("llama", backend="triton", device=DEVICE)
        cache = engine.cache
        evict = cache.evict

        def count_uploads() -> None:
            evictors = [e for row in cache.rows.values() for e in row.evictors if e.has_holes]
            before = device.num_uploads, len(device.launches), len(device.host_syncs)
            evict()
            assert len(device.host_syncs) == before[2]
            if device.launches[before[1] :]:
                evictions.append((len(evictors), device.num_uploads - before[0], device.launches[before[1] :]))

        monkeypatch.setattr(cache, "evict", count_uploads)
        run_requests(engine, [make_request(PROMPTS[1], 5, spec, GREEDY) for spec in specs])
    assert evictions == [(3, 1, ["punch"])] * 2


@slow
def test_heads_of_different_lengths() -> None:
    """Budgets shared among heads are counted on the host, which waits for them."""
    policies = ["h2o:budget=10,share=layer,value=norm", "h2o:budget=8,share=all", "h2o:budget=9,heads=union"]
    assert_matches_reference("llama", policies, may_wait=None)


def test_sampling_with_every_option() -> None:
    """The request's own uniform numbers draw the same tokens."""
    params = SamplingParams(temperature=0.8, top_k=20, top_p=0.9, min_p=0.01, repetition_penalty=1.2, seed=5,
                            presence_penalty=0.3, ignore_eos=True, logit_bias=((7, 2.0),))  # fmt: skip
    assert_matches_reference("llama", ["full"] * 3, params)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("spec", "temperature"),
    [
        ("ngram:k=3,min=1", 0.0),
        pytest.param("ngram:k=3,min=1", 0.7, marks=slow),
        pytest.param("self:k=3,budget=16,refresh=1", 0.7, marks=slow),
        ("self:k=3,dtype=int4", 0.0),
        pytest.param("self:k=3,dtype=k8v4", 0.7, marks=slow),
    ],
)
def test_drafts(spec: str, temperature: float) -> None:
    prompt = [5, 6, 7, 8] * 12
    likely = tuple((token, 9.0) for token in prompt[:4])  # so that there is something to draft
    params = SamplingParams(temperature=temperature, ignore_eos=True, seed=4, logit_bias=likely)

    def run(engine: Engine) -> tuple[list[list[int]], int]:
        requests = [make_request(prompt[i:], 5, params=params) for i in range(2)]
        tokens = run_requests(engine, requests)
        return tokens, sum(sum(r.stats.spec_decode.num_drafted_per_position) for r in requests)

    expected = run(make_engine("llama", backend="reference", drafter=drafters.parse(spec)))
    result, syncs = on_device(lambda make: run(make("llama", drafter=drafters.parse(spec))))
    assert result == expected and result[1] > 0
    if temperature == 0:
        assert result[0] == run(make_engine("llama", backend="reference"))[0]
    # Verification waits for tokens too, and self-drafting for the pages it selects.
    verification = {"rejection_sample:", "sample_one:", "verify_deterministic:", "_select_pages:"}
    assert {sync.split()[1] for sync in syncs} <= verification


@slow
@pytest.mark.parametrize(("family", "tier"), [("llama", "disk"), ("gemma3_text", "ram")])
def test_prefixes_and_tiers(family: str, tier: str, tmp_path: Path) -> None:
    """A prefix that is computed, found in the pool, and loaded from memory or a disk."""
    prompts = [[*range(40), 3, 4], [*range(40), 9]]
    expected = run_to_completion(make_engine(family, backend="reference"), [make_request(p, 3) for p in prompts])

    def run(make: MakeEngine) -> tuple[list[list[int]], int]:
        spec = disk_spec(tmp_path) if tier == "disk" else "ram:capacity=10MB"
        engine = make(family, prefix_cache="exact", tiers=[spec], num_pages=64)
        tokens = [run_requests(engine, [make_request(p, 3)])[0] for p in prompts]
        tree = engine.cache.prefix_cache.tree
        tree.evict(tree.num_evictable_pages)
        offloader_of(engine).sync()
        again = make_request(prompts[0], 3)
        tokens += run_requests(engine, [again])
        engine.cache.prefix_cache.close_offloader()
        return tokens, again.stats.num_cached_tokens

    (tokens, num_cached), _ = on_device(run)
    assert tokens == [*expected, expected[0]] and num_cached >= 32


@pytest.mark.parametrize("depth", [1, pytest.param(2, marks=slow)])
@pytest.mark.parametrize("policy", ["full", pytest.param("h2o:budget=40,interval=4", marks=slow)])
@pytest.mark.parametrize(
    "family", ["gemma3_text", pytest.param("llama", marks=slow), pytest.param("qwen3_next", marks=slow)]
)
def test_prefixes_are_kept_and_found_without_a_wait(family: str, policy: str, depth: int) -> None:
    """Rings that wrap, a rung on the way, and answers that end: nothing is read to keep windows and states."""
    prompts = [[*range(70), 3, 4], [*range(70), 3, 4, 9, 8]]

    def run(make: MakeEngine) -> list[int]:
        engine = make(family, prefix_cache="exact", num_pages=4000, snapshot_interval=32)
        engine.depth = depth
        requests = [make_request(p, 3, policy) for p in prompts]
        for request in requests:
            run_requests(engine, [request])
        return [r.stats.num_cached_tokens for r in requests]

    (_, num_cached), syncs = on_device(run)
    assert syncs == [], len(syncs)
    assert num_cached >= 32


@slow
@pytest.mark.parametrize(("policy", "tier"), [("h2o:budget=12,interval=2", "ram"), ("gate:budget=50%", "disk")])
def test_states_of_budgets_in_tiers(policy: str, tier: str, tmp_path: Path) -> None:
    """A second turn that goes on from what the first one kept, out of memory or off a disk."""
    options = {"prefix_cache": "exact", "num_pages": 64}

    def talk(engine: Engine) -> tuple[list[list[int]], int]:
        tree = engine.cache.prefix_cache.tree
        first = make_request([*range(40), 3, 4], 3, policy)
        tokens = run_requests(engine, [first])
        if offloader := engine.cache.prefix_cache.offloader:
            tree.evict(tree.num_evictable_pages)
            offloader.sync()
        second = make_request([*first.tokens, 5, 6], 3, policy)
        tokens += run_requests(engine, [second])
        engine.cache.prefix_cache.close_offloader()
        return tokens, second.stats.num_cached_tokens

    def run(make: MakeEngine) -> tuple[list[list[int]], int]:
        spec = disk_spec(tmp_path) if tier == "disk" else "ram:capacity=10MB"
        return talk(make("llama", tiers=[spec], **options))

    expected = talk(make_engine("llama", backend="reference", **options))
    assert expected[1] == 44
    assert on_device(run)[0] == expected


@pytest.mark.slow
def test_selective_loading(tmp_path: Path) -> None:
    """A prefix that is computed, loaded, and loaded again after it was repacked."""
    prompt = [*range(60), 3, 4]
    expected = run_to_completion(make_engine("llama", backend="reference"), [make_request(prompt, 2)])

    def run(make: MakeEngine) -> list[list[int]]:
        engine = make("llama", prefix_cache="selective:ratio=1", tiers=[disk_spec(tmp_path)])
        tokens = []
        for _ in range(3):
            clear_pool(engine)
            tokens += run_requests(engine, [make_request(prompt, 2)])
            offloader_of(engine).sync()
        assert sum(offloader_of(engine).num_loaded_tokens.values()) > 60
        return tokens

    assert on_device(run)[0] == expected * 3


@slow
def test_llm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several answers, log-probabilities, a grammar, scores and a draft model, through `LLM`."""

    def run(**options: str) -> list[Any]:
        small: dict[str, Any] = {"dtype": "float32", "kv_memory": "8MiB", "max_running_requests": 8, **options}
        llm, drafting = (
            LLM("random:tiny", **small),
            LLM("random:tiny", speculate="draft:model=random:tiny,k=2", **small),
        )
        assert llm.engine.depth == 1 + (options["backend"] == "triton"), "pending steps, on a device"
        params = SamplingParams(max_tokens=3, temperature=0.7, seed=1, n=2, logprobs=2, ignore_eos=True)
        short = SamplingParams(max_tokens=3, temperature=0, ignore_eos=True)
        outputs = [*llm.generate("hello there", params), *drafting.generate([[5, 6, 7, 8] * 5], short)]
        grammar = grammar_from_lark('start: "a" "b"')
        request = GenerateRequest("x", SamplingParams(max_tokens=2, temperature=0), grammar=grammar)
        logprobs = [p for output in outputs for p in output.logprobs or ()]
        tops = [(p.token_id, *(token for token, _ in p.top_logprobs)) for p in logprobs]
        scores = [round(x, 3) for x in llm.score([[5, 6, 7, 8]], [[9, 10]])[0]]
        return [[o.token_ids for o in outputs], tops, llm.generate_from_requests([request])[0].text, scores]

    expected = run(backend="reference", device="cpu")
    if triton.is_interpreted():
        from tests.helpers.fake_device import DEVICE, FakeDevice

        monkeypatch.setattr(kernels, "resolve_device", lambda name: DEVICE)
        with FakeDevice():
            assert run(backend="triton") == expected
    else:
        assert run(backend="triton", device="cuda") == expected


@slow
def test_warming_up_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """But recorded steps: of one request, and of three, padded. On a CPU it computes nothing."""
    if not triton.is_interpreted():
        pytest.skip("the requests of a GPU have other sizes")
    from retain.processing import warm_up as module
    from tests.helpers.fake_device import DEVICE, FakeDevice

    monkeypatch.setattr(module, "WARM_UP_BATCHES", ((1, 5), (3, 40)))
    small: dict[str, Any] = {"dtype": "float32", "kv_memory": "8MiB", "max_running_requests": 8}
    on_cpu = LLM("random:tiny", **small)
    monkeypatch.setattr(on_cpu.engine.runner, "forward", None)
    on_cpu.warm_up()
    monkeypatch.setattr(kernels, "resolve_device", lambda name: DEVICE)
    with FakeDevice():
        llm = LLM("random:tiny", backend="triton", **small)
        prefix_cache = llm.cache.prefix_cache
        llm.warm_up()
        llm.cache.check()
        assert llm.cache.free_pages == llm.cache.total_pages
        assert llm.cache.prefix_cache is prefix_cache and not len(prefix_cache.tree.all_pages)
        batch_sizes = {key[0].B for key in llm.engine.runner.program._graphs.graphs}  # type: ignore[attr-defined]
        assert batch_sizes == {1, 4}


def test_warming_up_leaves_out_what_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = LLM("random:tiny", dtype="float32", kv_memory="8MiB", max_model_len=5)
    monkeypatch.setattr(llm, "device", torch.device("meta"))
    llm.warm_up()
    assert llm.generate([[5, 6]], SamplingParams(max_tokens=2, temperature=0, ignore_eos=True))


@pytest.mark.parametrize("policy", ["full", "sinks:budget=10,interval=1", "window:budget=10,interval=4"])
def test_kept_positions_are_those_behind_the_prompt(policy: str) -> None:
    """With two pending steps the next token has been computed when the first is known."""
    llm = LLM("random:tiny", dtype="float32", kv_memory="8MiB")
    expected = llm.kept_positions([5, 6, 7, 8] * 5, policy)
    llm.engine.depth = 2
    assert llm.kept_positions([5, 6, 7, 8] * 5, policy) == expected


def test_fake_device_refuses_mixing_and_records_waits() -> None:
    if not triton.is_interpreted():
        pytest.skip("a GPU needs no fake device")
    from tests.helpers.fake_device import DEVICE, FakeDevice

    with FakeDevice() as device:
        x = torch.ones(3, device=DEVICE)
        assert x.device == DEVICE and device.host_syncs == []
        for mix in (lambda: x + torch.ones(3), lambda: torch.cat((x, torch.ones(1))), lambda: x.numpy()):
            with pytest.raises((RuntimeError, TypeError)):
                mix()
        assert device.host_syncs == []
        (x + 1).sum().tolist(), x[torch.tensor([0])], x[x > 0], x.cpu(), torch.ones(2).to(DEVICE)
        assert len(device.host_syncs) == 5
        torch.ones(2).to(DEVICE, non_blocking=True)
        assert len(device.host_syncs) == 5


@pytest.mark.skipif(not triton.is_interpreted(), reason="a GPU counts no uploads")
@pytest.mark.parametrize(
    ("policy", "params", "uploads", "operations"),
    [
        ("full", GREEDY, 1, 5),
        pytest.param("h2o:budget=20,interval=4", GREEDY, 1, 5, marks=slow),
        pytest.param("full", SamplingParams(temperature=0.7, ignore_eos=True, seed=3), 2, 24, marks=slow),
        pytest.param(
            "full", SamplingParams(temperature=0.7, top_k=9, top_p=0.9, min_p=0.1, ignore_eos=True), 2, 42, marks=slow
        ),
    ],
)
def test_the_host_does_little_for_a_recorded_step(
    policy: str, params: SamplingParams, uploads: int, operations: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its launches wait for nothing. New pages of any number of rows, and evictions, are one upload more each."""
    from retain.kernels.triton.graphs import CapturedStep, CUDAGraphRunner
    from tests.helpers.fake_device import DEVICE, FakeDevice

    capture, recorded = CUDAGraphRunner._capture, [0, 0]  # launches and operations of recorded steps

    def capture_counted(self: CUDAGraphRunner, shape: Any, batch: Any) -> CapturedStep:
        step = capture(self, shape, batch)

        def replay() -> Any:
            before = len(device.launches), len(device.operations)
            output = step.replay()
            recorded[0] += len(device.launches) - before[0]
            recorded[1] += len(device.operations) - before[1]
            num_replays.append(1)
            return output

        return CapturedStep(step.inputs, replay)

    monkeypatch.setattr(CUDAGraphRunner, "_capture", capture_counted)
    num_replays: list[int] = []
    counts: list[tuple[int, int, int]] = []  # uploads, launches and operations of a step
    unrecorded: list[int] = []  # uploads
    with FakeDevice() as device:
        with device.allow_syncs():
            engine = make_engine("llama", backend="triton", device=DEVICE, num_pages=3000, max_running_requests=8)
        engine.depth = 2
        S = engine.cache.page_size
        engine.add(*(make_request([*range(11 + i, 20 + i)], S + 8, policy, params) for i in range(4)))
        while engine.has_unfinished_requests:
            before = device.num_uploads, len(device.launches), len(device.operations), len(num_replays), *recorded
            launched = engine.launch()
            assert not device.host_syncs
            if len(num_replays) > before[3]:
                launches = len(device.launches) - before[1] - (recorded[0] - before[4])
                done = len(device.operations) - before[2] - (recorded[1] - before[5])
                counts.append((device.num_uploads - before[0], launches, done))
            else:
                unrecorded.append(device.num_uploads - before[0])
            with device.allow_syncs():
                if len(engine.pending_steps) > 1 or not launched:
                    engine.collect()
    steady = [count for count in counts if count[0] == uploads]
    assert len(steady) > len(counts) // 3
    assert max(launches for _, launches, _ in counts) <= 3  # pending tokens, slots, evictions
    assert max(done for *_, done in steady) <= operations
    assert max(n for n, *_ in counts) <= uploads + 2
    assert max(unrecorded) <= uploads + 8  # free pages, tables, tiles, scoring, its tiles, the eviction of a prompt


@slow
def test_a_step_is_launched_before_tokens_are_known() -> None:
    """With ends, cancellation, preemption, eviction, a ring, penalties and drafts. Only `collect` waits for tokens."""
    expected = run_to_completion(make_engine("llama", backend="reference"), overlapped_requests(7))
    stop_token = expected[STOPPED][3]
    requests = overlapped_requests(7, stop_token)
    overlapped, syncs = on_device(lambda make: run_overlapped(make("llama"), requests))
    assert_tokens_equal(requests, expected, stop_token)
    assert len(overlapped) == len(requests) - 2
    assert not syncs
