"""Laws of ranks: several compute what one does, to the bit where no mixture of experts adds up their parts."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from retain import LLM, SamplingParams, models
from retain.engine.engine import Engine
from retain.engine.request import Logprob
from retain.kernels import cpu
from retain.kernels.ranks import RankError
from retain.kernels.slots.pool_dtypes import INT8
from retain.kv.eviction import evictor, query_scored
from retain.kv.eviction.policies import compactor
from retain.kv.journal import Call, DivergedError, JournalReader
from retain.models.adapter_bank import AdapterBank
from retain.models.passes.shard import own_query_heads
from retain.models.weights import Weights
from tests.helpers.adapters import write_adapter
from tests.helpers.attention_case import torch_threads
from tests.helpers.decoder_runner import build_model, random_tokens, run_decoder
from tests.helpers.engines import make_engine, make_request, random_prompts
from tests.helpers.folders import save_tiny_smollm2
from tests.helpers.marks import slow
from tests.helpers.ranks import ThreadRanks, end_workers, run_ranks
from tests.helpers.schedule_runner import ScheduleRun
from tests.helpers.schedules import draw_schedule, families_of_tests, model_spec
from tests.helpers.tiny_models import has_experts, tiny_checkpoint

PARAMS = SamplingParams(temperature=0, ignore_eos=True, seed=0, logprobs=2)
OPTIONS: list[dict[str, Any]] = [
    {},
    {"policy": "h2o:budget=40,interval=16"},
    {"policy": "keyformer:budget=40", "kv_dtype": INT8, "weights": "int8"},
    {"policy": "look:slots=32", "looks": True, "weights": "int4", "prompt_activations": "bfloat16"},
]
needs_cpu = pytest.mark.skipif(cpu.unavailable_reason() is not None, reason="the cpu backend is not built")


def compute_logits(family: str, ranks: ThreadRanks | None = None) -> Tensor:
    model = build_model(Weights(tiny_checkpoint(family), torch.float32).with_passes(group=ranks))
    return run_decoder(model, [random_tokens(19), random_tokens(11, seed=1)], [[12, 5], [1, 1], [6, 5]])[0]


@pytest.mark.parametrize("size", [2, *slow(3, 4)])
@pytest.mark.parametrize("family", models.list_families())
def test_logits_of_ranks_are_those_of_one(family: str, size: int) -> None:
    """In the definition, whose products have other bits where a matrix has fewer rows."""
    alone = compute_logits(family)
    for logits in run_ranks(size, lambda ranks: compute_logits(family, ranks)):
        torch.testing.assert_close(logits, alone, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("vocab_size", [65, 97])
def test_a_rank_behind_the_last_row_adds_nothing(vocab_size: int) -> None:
    """Four ranks have 32 rows each: the last has none of a vocabulary of 65, or repeats the last of 97."""
    changes = {"vocab_size": vocab_size, "tie_word_embeddings": True}

    def compute(ranks: ThreadRanks | None = None) -> Tensor:
        model = build_model(Weights(tiny_checkpoint("llama", **changes), torch.float32).with_passes(group=ranks))
        return run_decoder(model, [torch.tensor([vocab_size - 1, 3, vocab_size - 2])], [[3]])[0]

    alone = compute()
    for logits in run_ranks(4, compute):
        torch.testing.assert_close(logits, alone, rtol=1e-4, atol=1e-4)


def answer(
    family: str, num_ranks: int, policy: str = "full", prompts: Sequence[Sequence[int]] = (), **options: Any
) -> tuple[list[Any], Engine]:
    engine = make_engine(family, backend="cpu", num_ranks=num_ranks, prefix_cache="exact", **options)
    requests = [make_request(p, 10, policy, PARAMS) for p in prompts or random_prompts(5)]
    engine.add(*requests)
    while engine.has_unfinished_requests:
        engine.step()
        engine.cache.check()
    return [(r.output_tokens, r.logprobs) for r in requests], engine


@needs_cpu
@pytest.mark.parametrize("options", OPTIONS, ids=lambda x: x.get("policy", "full"))
@pytest.mark.parametrize("family", ["llama", "gpt_oss", "qwen3_5_text", "deepseek_v3", *slow(*models.list_families())])
def test_answers_of_ranks_are_those_of_one(family: str, options: dict[str, Any]) -> None:
    with torch_threads(1):
        alone, _ = answer(family, 1, **options)
        for size in (2, 4):
            together, _ = answer(family, size, **options)
            assert [tokens for tokens, _ in together] == [tokens for tokens, _ in alone]
            if not has_experts(family):
                assert together == alone
            gc.collect()  # ends the ranks


@needs_cpu
@pytest.mark.parametrize("seed", [*range(4), *slow(*range(4, 40))])
@pytest.mark.parametrize("size", [2, *slow(4)])
def test_every_request_of_a_random_schedule_on_ranks_equals_itself_alone(seed: int, size: int, tmp_path: Path) -> None:
    """Preemption, chunks, company, prefixes, budgets, quantized slots and weights, drafts."""
    with torch_threads(1), families_of_tests():
        run = ScheduleRun(draw_schedule(seed, ["cpu"]).on_ranks(size), tmp_path)
        run.run()
        assert not list(run.differences())


@needs_cpu
@pytest.mark.parametrize("family", ["llama", "cohere2", "qwen3_5_text"])
@pytest.mark.parametrize("damage", ["", "missing", "torn"])
def test_ranks_load_what_all_of_them_have(family: str, damage: str, tmp_path: Path) -> None:
    """After a restart; a folder of one rank may have lost its spans, or their content."""
    tiers = [f"disk:path={tmp_path},capacity=64MiB"]
    prompt = random_prompts(1, max_prompt_len=300)[0] * 4
    prompt = prompt[:400]
    alone, _ = answer(family, 1, prompts=[prompt])
    for is_first in (True, False):
        found, engine = answer(family, 2, prompts=[prompt], tiers=tiers)
        assert found == alone
        loaded = engine.cache.prefix_cache.hits_by_source()["disk"]
        assert loaded == 0 if is_first or damage == "missing" else loaded > 0
        engine.cache.prefix_cache.close_offloader()
        end_workers(engine)
        for file in (tmp_path / "rank-1-of-2").rglob("*") if damage else ():
            if file.is_file() and file.parent.parent != tmp_path:
                content = file.read_bytes()
                half = len(content) // 2
                file.write_bytes(content[:half] + bytes(len(content) - half)) if damage == "torn" else file.unlink()


def test_heads_are_divided_where_all_layers_divide_alike() -> None:
    assert own_query_heads(model_spec("gpt2"), 2) == 2
    assert own_query_heads(model_spec("gpt2"), 3) == 2, "the last rank repeats heads"
    assert own_query_heads(model_spec("gemma4_text"), 2) == 2
    assert own_query_heads(model_spec("gemma3_text"), 2) is None, "all query heads share one kv head"
    assert own_query_heads(model_spec("deepseek_v3"), 2) is None
    with families_of_tests():
        assert own_query_heads(model_spec("unlike"), 2) is None


@needs_cpu
def test_each_rank_has_its_part_of_the_weights_and_of_the_heads() -> None:
    _, alone = answer("llama", 1)
    _, first = answer("llama", 2)
    whole, part = (engine.runner.program.weight_bytes for engine in (alone, first))
    assert part == whole // 2
    assert first.cache.spec.only_group.num_kv_heads == 1
    assert first.cache.pages_needed(make_request([1]).policy, 64, 64) * 2 == alone.cache.pages_needed(
        make_request([1]).policy, 64, 64
    )


COMPARING = [
    "h2o:budget=40,share=layer",
    "h2o:budget=40,share=all,shrink=20",
    "tova:budget=40,heads=union",
    "snapkv:budget=40,share=layer",
    "knorm:budget=30%,share=all,resume=on",
    "h2o:budget=32,share=fitted",
    "random:budget=40",
    "gate:budget=40",
    "gate_replay:budget=40,share=none",
    "gate_replay:budget=40",
    "compactor:budget=40,share=layer",
    "compactor:budget=40",
    "press:budget=40,press=tests.helpers.presses.ExpectedAttention,share=layer",
    "reread:budget=40,first=4",
]


@pytest.mark.parametrize("family", ["llama", "gemma3_text", *slow(*models.list_families())])
def test_all_ranks_know_the_layers_that_take_adapters(family: str) -> None:
    """Also those all of whose rows others have: an adapter of such a layer is no error."""

    def shapes(ranks: ThreadRanks | None = None) -> dict[str, set[tuple[int, int]]]:
        bank = AdapterBank(1, 2, torch.float32)
        build_model(Weights(tiny_checkpoint(family), torch.float32).with_passes(bank, ranks))
        return {name: {(e.rows.total, e.a.shape[2]) for e in entries} for name, entries in bank.entries.items()}

    alone = shapes()
    assert run_ranks(4, shapes) == [alone] * 4


@needs_cpu
@pytest.mark.parametrize("policy", COMPARING)
@pytest.mark.parametrize("family", ["llama", *slow("gpt2", "gemma4_text", "cohere2")])
def test_policies_that_compare_heads_keep_on_ranks_what_they_keep_on_one(family: str, policy: str) -> None:
    with torch_threads(1):
        alone, _ = answer(family, 1, policy, demotes=True)
        for size in (2, 3):
            together, _ = answer(family, size, policy, demotes=True)
            assert together == alone
            gc.collect()  # ends the ranks


def test_heads_that_divide_a_budget_demote_on_one_rank_alone() -> None:
    policy = "h2o:budget=24,share=layer,demote=int4:50%"
    with pytest.raises(ValueError, match="demote goes with heads that divide a budget on one rank alone"):
        answer("llama", 2, policy, demotes=True)
    answer("gemma3_text", 2, policy, demotes=True)  # each rank has all heads


@needs_cpu
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_fails_while_heads_are_compared_ends_all(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    inner = evictor.compact

    def fail(tables: Any, *args: Any) -> Any:
        if tables.rows[0].policy.kv_heads.group.rank == rank:
            raise ZeroDivisionError("planted")
        return inner(tables, *args)

    monkeypatch.setattr(evictor, "compact", fail)
    engine = make_engine("llama", backend="cpu", num_ranks=2)
    engine.add(make_request(random_prompts(1)[0] * 3, 20, "h2o:budget=24,share=layer", PARAMS))
    with pytest.raises((RankError, ZeroDivisionError), match="planted"):
        while engine.has_unfinished_requests:
            engine.step()
    with pytest.raises(BaseException):  # noqa: B017  # whatever the group raises: nothing goes on
        engine.step()


@needs_cpu
@pytest.mark.parametrize("policy", ["replay:budget=40", "compactor:budget=40", "dropkv:budget=40,share=none"])
def test_ranks_score_as_many_queries_at_a_time_as_one(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their sums are over parts, whose sizes decide the last bits."""
    for module in (query_scored, compactor):
        monkeypatch.setattr(module, "MAX_WEIGHTS", 2**13)
    monkeypatch.setattr(query_scored, "MIN_QUERIES", 1)
    with torch_threads(1):
        alone, _ = answer("llama", 1, policy)
        together, _ = answer("llama", 2, policy)
    assert together == alone


def test_a_rank_that_gets_other_results_says_so() -> None:
    engine = make_engine("llama")
    reader = JournalReader(engine.cache)
    with pytest.raises(DivergedError, match="open returned 0, and 1 on the first rank"):
        reader.repeat([Call("open", None, (make_request([1]).policy, 1), 1, 0.0)], [])


def test_a_step_that_fails_on_the_first_rank_is_the_last() -> None:
    """The others wait for its exchanges: a next step would meet those of this one."""
    engine = make_engine("llama", num_ranks=2)
    engine.add(make_request([1, 2, 3], 20))
    engine.step()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine.runner, "forward", lambda batch: 1 / 0)
        with pytest.raises(RankError, match="ZeroDivisionError"):
            engine.step()
    with pytest.raises(RankError):
        engine.step()


def test_a_rank_that_fails_ends_the_step() -> None:
    engine = make_engine("llama", num_ranks=2)
    assert engine.driver is not None
    engine.driver.group.broadcast("nonsense")
    engine.add(make_request([1, 2, 3]))
    with pytest.raises(RankError, match="has no attribute"):
        engine.step()


# ---- processes -------------------------------------------------------------------------------------------------------


def logprobs_of(llm: LLM, lora: str | None = None, **options: Any) -> list[Logprob]:
    params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True, logprobs=2)
    return list(llm.generate("the sea " * 20, params, lora=lora, **options)[0].logprobs)


@pytest.mark.parametrize("backend", ["reference", pytest.param("cpu", marks=needs_cpu), *slow("triton")])
def test_processes_answer_as_one(backend: str, tmp_path: Path) -> None:
    """Also with adapters, of which one comes later, and a prefix that is pinned."""
    (tmp_path / "model").mkdir()
    target = save_tiny_smollm2(tmp_path / "model", "llama")
    a, b = (write_adapter(tmp_path / n, target, ["q_proj", "down_proj"], seed) for seed, n in enumerate("ab"))
    options: dict[str, Any] = {"dtype": "float32", "kv_memory": "16MiB", "backend": backend, "lora": f"a={a}"}
    found = []
    for size in (1, 2):
        llm = LLM(str(target), tensor_parallel=size, max_loras=2, **options)
        assert llm.pin("the sea " * 20, 60) > 0
        llm.load_lora("b", b)
        found.append([logprobs_of(llm), logprobs_of(llm, "a"), logprobs_of(llm, "b")])
        if backend != "triton":  # whose interpreter is mended for masses, but not in other processes
            found[-1].append(logprobs_of(llm, kv_policy="h2o:budget=24"))
            found[-1].append(logprobs_of(llm, kv_policy="compactor:budget=24,share=layer"))
        llm.close()
    for alone, together in zip(*found, strict=True):
        assert [x.token_id for x in together] == [x.token_id for x in alone]
        assert [x.logprob for x in together] == pytest.approx([x.logprob for x in alone], abs=1e-5)
        assert backend != "cpu" or together == alone


@pytest.mark.parametrize("backend", ["reference", pytest.param("cpu", marks=needs_cpu)])
def test_a_rank_that_dies_ends_the_engine(backend: str) -> None:
    llm = LLM("random:tiny", tensor_parallel=2, kv_memory="16MiB", backend=backend)
    assert llm.ranks is not None
    os.kill(*llm.ranks.process_ids, signal.SIGKILL)
    with pytest.raises(RankError, match="has ended: nothing more can be computed"):
        llm.generate("hello", SamplingParams(max_tokens=200, ignore_eos=True))
    llm.close()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv_offload": "disk:path=x,capacity=1MiB", "kv_policy": "look:slots=64"}, "does not go with kv_offload"),
        ({"prefix_cache": "selective", "tier": ["ram:capacity=1MiB"]}, "prefix_cache=selective chooses tokens by"),
        ({"speculate": "self"}, "with tensor_parallel use ngram, suffix or draft:model=M"),
        ({"speculate": "mtp"}, "draft heads do not go with tensor_parallel"),
        ({"kv_policy": "gate:budget=40"}, "gate"),
        ({"tensor_parallel": 0}, "tensor_parallel"),
    ],
)
def test_what_ranks_cannot_do_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LLM("random:tiny", **{"tensor_parallel": 2, "kv_memory": "16MiB", **options})
