"""Law 4 for budgets in tiers: a conversation whose state went to a tier and back equals one that was never paused."""

from __future__ import annotations

import logging
import os
import random
import shutil
from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from retain.cli.main import main
from retain.engine.engine import Engine
from retain.engine.request import Request
from retain.kernels.pool_dtypes import INT4, INT8
from retain.kv.checkpoints.budget import CheckpointKind
from retain.kv.checkpoints.budget.checkpoint import BudgetCheckpoint
from retain.kv.checkpoints.budget.state_format import decode_state, encode_state, with_pages
from retain.kv.eviction import policies
from retain.kv.eviction.budget import BudgetPolicy
from retain.kv.prefix.radix_tree import RadixTree
from retain.kv.stores.cost_model import LoadCostModel
from retain.kv.stores.span import Span
from retain.kv.stores.tiers.ram import RamStore
from retain.sampling_params import SamplingParams
from tests.helpers import engines
from tests.helpers.engines import iter_steps, make_engine, make_request, run_to_completion
from tests.helpers.gates import random_gate
from tests.helpers.marks import slow
from tests.helpers.stored_spans import data_offset, span_files
from tests.helpers.tiers import disk_spec, disk_store_of, offloader_of
from tests.helpers.unlike_family import UNLIKE
from tests.helpers.unlike_family import unlike_family as unlike_family
from tests.invariants.test_resuming import (
    POLICIES,
    TURNS,
    Positions,
    answers,
    ask,
    options_of,
    record_positions,
    talk,
    talk_in_one_row,
)

FAMILIES = ["gemma3_text", *slow("llama", "mpt")]
H2O = "h2o:budget=25%"
Conversation = tuple[list[list[int]], list[Positions]]


class Pauses:
    """An engine whose pool is emptied between two requests: `kind` says how. What it has lies in `path`."""

    def __init__(self, kind: str, path: Path, **options: Any):
        self.kind = kind
        self.path = path
        self.options = options
        self.num_pauses = 0
        self.engine = self.open()

    def open(self) -> Engine:
        """Open an engine on what the last one left."""
        tier = disk_spec(self.path / str(self.num_pauses if self.kind == "killed" else 0))
        if self.kind == "ram":
            tier = "ram:capacity=100MB"
        elif self.kind == "remote":
            tier = f"remote:url=file://{self.path}/kv,refresh=0.01"
        engine = make_engine(prefix_cache="exact", tiers=[tier], max_running_requests=4, **self.options)
        for store in offloader_of(engine).stores:
            store.sync()
        return engine

    def pause(self) -> None:
        """Empty the pool, or leave the engine as it is and open another one."""
        self.num_pauses += 1
        tree = self.engine.cache.prefix_cache.tree
        if self.kind in ("ram", "disk"):
            tree.evict(tree.num_evictable_pages)
            assert not tree.num_evictable_pages
        offloader_of(self.engine).sync()
        if self.kind == "killed":  # the folder as it is now, with the log of SQLite
            shutil.copytree(self.path / str(self.num_pauses - 1), self.path / str(self.num_pauses))
        if self.kind in ("restart", "killed", "remote"):
            self.close()
            self.engine = self.open()

    def close(self) -> None:
        """Close the tiers."""
        self.engine.cache.prefix_cache.close_offloader()


def spans_of_states(store: RamStore) -> list[Span]:
    """The spans of states in a store in memory: beside them are those of prompts, which have no metadata."""
    return [span for span in store.span_index if span.metadata_bytes]


def talk_with_pauses(policy: str, pauses: Pauses) -> tuple[list[Request], list[Positions]]:
    """Hold a conversation, with a pause behind each turn."""
    positions: list[Positions] = []

    def answer(text: list[int], policy: str) -> Request:
        found = record_positions(pauses.engine)
        request = ask(pauses.engine, text, policy)
        positions.append(found[-1])
        pauses.pause()
        return request

    return talk(policy, answer), positions


@cache
def expected_conversation(policy: str, family: str) -> Conversation:
    """Return the answers of a conversation in one row, and the positions at the end of each turn."""
    turns, positions = talk_in_one_row(policy, **options_of(family, policy))
    return answers(turns), positions


@pytest.mark.parametrize("kind", ["ram", "restart", *slow("disk", "killed", "remote")])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("policy", POLICIES)
def test_conversation_with_pauses_equals_one_row(kind: str, family: str, policy: str, tmp_path: Path) -> None:
    """The same tokens and positions; only new tokens are computed; what was read is in the statistics."""
    pauses = Pauses(kind, tmp_path, **options_of(family, policy))
    found, positions = talk_with_pauses(policy, pauses)
    assert (answers(found), positions) == expected_conversation(policy, family)
    known = [len(r.tokens) - 1 for r in found[:-1]]
    assert [r.stats.num_cached_tokens for r in found[1:]] == known
    if kind in ("ram", "disk"):
        hits = pauses.engine.cache.prefix_cache.hits_by_source()
        assert hits == {"pool": 0, kind: sum(known)}
    stats = offloader_of(pauses.engine).stats()
    assert all(0 < t["bytes"] <= t["capacity"] for t in stats)
    pauses.close()


@pytest.mark.parametrize("policy", ["h2o:budget=30%,prefill=stream,chunk=24", *slow("h2o:budget=50%,share=layer")])
def test_unlike_layers_resume_from_a_tier(policy: str, unlike_family: None, tmp_path: Path) -> None:
    """Groups of layers whose pages differ in slots go on together."""
    expected = talk(policy, partial(ask, make_engine(prefix_cache="exact", **options_of(UNLIKE, policy))))
    found, _ = talk_with_pauses(policy, Pauses("restart", tmp_path, **options_of(UNLIKE, policy)))
    assert answers(found) == answers(expected)
    assert [r.stats.num_cached_tokens for r in found] == [r.stats.num_cached_tokens for r in expected]


@pytest.mark.parametrize("kv_dtype", [INT4, *slow(INT8, torch.bfloat16)])
@pytest.mark.parametrize("kind", ["restart", *slow("ram")])
def test_slots_of_fewer_bits_resume_from_a_tier(kv_dtype: torch.dtype, kind: str, tmp_path: Path) -> None:
    """Scales, exponents and all else that belongs to a page's bytes come back."""
    options = options_of("llama", H2O, kv_dtype=kv_dtype)
    expected = talk(H2O, partial(ask, make_engine(prefix_cache="exact", **options)))
    found, _ = talk_with_pauses(H2O, Pauses(kind, tmp_path, **options))
    assert answers(found) == answers(expected)
    assert all(r.stats.num_cached_tokens for r in found[1:])


# ---- misses ----------------------------------------------------------------------------------------------------------


def begin(policy: str, pauses: Pauses, turns: int = 2, **more: Any) -> list[int]:
    """Hold the first turns of a conversation. Returns the text of the next one, after a pause."""
    requests = talk(policy, partial(ask, pauses.engine, **more), TURNS[:turns])
    pauses.pause()
    return [*requests[-1].tokens, 1, 2, 3]


def damage_pages(path: Path) -> None:
    """Change a bit of K."""
    change(path, lambda data: data_offset(data.tobytes()) + 100)


def damage_metadata(path: Path) -> None:
    """Change a bit of the metadata, which lie behind the last pages."""
    change(path, lambda data: int(np.flatnonzero(data)[-1]))


def change(path: Path, place: Callable[[np.ndarray], int]) -> None:
    for file in span_files(path):
        data = np.fromfile(file, np.uint8)
        data[place(data)] ^= 4
        data.tofile(file)


def truncate(path: Path) -> None:
    for file in span_files(path):
        os.truncate(file, file.stat().st_size // 2)


def unlink(path: Path) -> None:
    for file in span_files(path):
        file.unlink()


@pytest.mark.parametrize("damage", [damage_metadata, *slow(damage_pages, truncate, unlink)])
@pytest.mark.parametrize("when", ["before", *slow("while it runs")])
@pytest.mark.parametrize("family", ["llama", *slow("gemma3_text")])
def test_damaged_states_are_misses(damage: Callable[[Path], None], when: str, family: str, tmp_path: Path) -> None:
    """The prompt is computed anew under its budget, and its state is kept again."""
    options = options_of(family, H2O)
    pauses = Pauses("restart", tmp_path, **options)
    text = begin(H2O, pauses)
    if when == "before":
        pauses.close()
        damage(tmp_path)
        pauses.engine = pauses.open()
    else:
        damage(tmp_path)
    found = ask(pauses.engine, text, H2O)
    assert found.stats.num_cached_tokens == 0
    assert found.output_tokens == ask(make_engine(**options), text, H2O).output_tokens
    pauses.pause()
    assert ask(pauses.engine, [*found.tokens, 4], H2O).stats.num_cached_tokens == len(found.tokens) - 1
    pauses.close()


NOISED = "keyformer:budget=25%"


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"salt": "a"}, {"salt": "b"}),
        ({"policy": H2O}, {"policy": "h2o:budget=50%"}),
        ({"policy": H2O}, {"policy": NOISED}),  # tova would find pages of the prompt
        ({"policy": H2O}, {"policy": "h2o:budget=25%,resume=off"}),
        ({"policy": NOISED, "seed": 1}, {"policy": NOISED, "seed": 2}),
        ({"policy": "h2o:budget=25%,protect=system", "system": 4}, {"policy": "h2o:budget=25%,protect=system"}),
    ],
)
@pytest.mark.parametrize("kind", ["restart", *slow("ram", "remote")])
def test_states_of_others_are_never_read(
    first: dict[str, Any], second: dict[str, Any], kind: str, tmp_path: Path
) -> None:
    """Neither across salts or policies, nor across seeds of noise or other system prompts."""
    pauses = Pauses(kind, tmp_path, **options_of("llama", H2O))

    def send(text: list[int], policy: str = H2O, salt: str = "", seed: int = 0, system: int = 0) -> Request:
        params = SamplingParams(temperature=0, ignore_eos=True, seed=seed)
        request = make_request(text, 20, policy, params, system, salt=salt)
        run_to_completion(pauses.engine, [request])
        return request

    text = list(range(20, 110))
    text = [*text, *send(text, **first).output_tokens, 1, 2, 3]
    pauses.pause()
    assert send(text, **second).stats.num_cached_tokens == 0
    pauses.pause()  # what the second request left of the prompt is of no use without its masses
    assert send(text, **first).stats.num_cached_tokens == 109
    pauses.close()


@pytest.mark.parametrize(
    "other", [{"score_columns": 2}, *slow({"family": "mpt"}, {"page_size": 32}, {"demotes": True}, {"gate": True})]
)
def test_states_of_another_model_cache_or_gate_are_never_read(
    other: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = "gate:budget=50%"
    options = options_of("llama", policy)
    pauses = Pauses("restart", tmp_path, **options)
    text = begin(policy, pauses, 1)

    def num_cached(**more: Any) -> int:
        pauses.close()
        pauses.options = {**options, **more}
        pauses.engine = pauses.open()
        return ask(pauses.engine, text, policy, 1).stats.num_cached_tokens

    with monkeypatch.context() as patch:
        if other.pop("gate", False):
            patch.setattr(
                engines, "random_gate", lambda spec: replace(random_gate(spec), logs=0 * random_gate(spec).logs)
            )
        assert num_cached(**other) == 0
    assert num_cached() == len(text) - 4
    pauses.close()


READ = "retain.kv.stores.reader.SpanReader.read_blocks"
UPLOAD = "retain.kv.stores.whole_pages.WholePageTransfer.upload"


@pytest.mark.parametrize("error", [MemoryError, *slow(OSError, TimeoutError)])
@pytest.mark.parametrize("call", [UPLOAD, *slow(READ)])
def test_errors_are_misses(
    error: type[Exception], call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Pages that were taken are free again (`ask` has the accountant look), and one line is logged."""
    options = options_of("llama", H2O)
    pauses = Pauses("restart", tmp_path, **options)
    text = begin(H2O, pauses)

    def fail(*_: object) -> None:
        raise error("broken")

    with monkeypatch.context() as patch:
        patch.setattr(call, fail)
        found = ask(pauses.engine, text, H2O)
    assert found.stats.num_cached_tokens == 0
    assert found.output_tokens == ask(make_engine(**options), text, H2O).output_tokens
    (warning,) = [r for r in caplog.records if r.levelno == logging.WARNING]
    assert warning.getMessage().startswith(("tier disk: a span", "tier disk: a checkpoint")) and not warning.exc_info
    pauses.close()


@pytest.mark.parametrize("family", ["llama", *slow("gemma3_text")])
def test_state_that_finds_no_pages_is_a_miss(family: str, tmp_path: Path) -> None:
    """A pool without pages for it; with more of them the state is still there."""
    options = options_of(family, H2O)
    pauses = Pauses("restart", tmp_path, **options)
    text = begin(H2O, pauses)
    pool = pauses.engine.cache.pool
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pool, "ensure_free", lambda n: False)
        request = make_request(text, 1, H2O)
        cache = pauses.engine.cache
        row = cache.open(request.policy, len(text))
        task = request.row_task()
        assert row.start(task, cache.find(request.policy, task)).position == 0
        row.close()
        pauses.engine.cache.check()
    assert ask(pauses.engine, text, H2O).stats.num_cached_tokens == len(text) - 4
    pauses.close()


@pytest.mark.parametrize("position", [b"9", b"1", *slow(b"x")])
def test_metadata_that_make_no_sense_are_a_miss(
    position: bytes, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Where no checksum can tell: in memory. One line is logged, and the span is dropped."""
    options = options_of("llama", H2O)
    pauses = Pauses("ram", tmp_path, **options)
    text = begin(H2O, pauses, 1)
    (store,) = offloader_of(pauses.engine).stores
    num_spans = store.stats()["spans"]
    (span,) = spans_of_states(store)
    metadata = span.view_metadata(store.bucket.objects[span.name].data)
    at = metadata.tobytes().index(b'"position": ') + len('"position": ')
    metadata[at] = position[0]
    found = ask(pauses.engine, text, H2O)
    assert found.stats.num_cached_tokens == 0
    assert found.output_tokens == ask(make_engine(**options), text, H2O).output_tokens
    (warning,) = [r for r in caplog.records if r.levelno == logging.WARNING]
    assert not warning.exc_info and store.stats()["spans"] == num_spans - 1
    pauses.close()


def test_earlier_state_stays_while_a_later_one_is_not_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pool has the state of the first turn, evicts all that it can to read the second one, and fails."""
    options = options_of("llama", H2O)
    pauses = Pauses("restart", tmp_path, **options)
    text = begin(H2O, pauses)
    engine = pauses.engine
    assert ask(engine, [*text[: TURNS[0] + 20], 127], H2O).stats.num_cached_tokens == TURNS[0] + 19
    tree = engine.cache.prefix_cache.tree

    def fail(*_: object) -> None:
        raise MemoryError("broken")

    with monkeypatch.context() as patch:
        patch.setattr(UPLOAD, fail)
        patch.setattr(engine.cache.pool, "ensure_free", lambda n: tree.evict(tree.num_evictable_pages) is None)
        found = ask(engine, text, H2O)
    assert found.stats.num_cached_tokens == TURNS[0] + 19
    other = make_engine(prefix_cache="exact", **options)
    ask(other, text[: TURNS[0]], H2O)
    assert found.output_tokens == ask(other, text, H2O).output_tokens
    pauses.close()


def test_computing_that_is_faster_reads_nothing(tmp_path: Path) -> None:
    pauses = Pauses("restart", tmp_path, **options_of("llama", H2O))
    text = begin(H2O, pauses)
    model = LoadCostModel()
    offloader_of(pauses.engine).cost_model = model
    model.record_compute(10**9, 1.0)
    model.record_read("disk", 1, 1.0)
    assert ask(pauses.engine, text, H2O).stats.num_cached_tokens == 0
    assert disk_store_of(pauses.engine).counts["read"] == 0
    pauses.close()


# ---- what is kept ----------------------------------------------------------------------------------------------------


def states_of(engine: Engine) -> list[int]:
    """Return the positions of the states in the last store."""
    offloader_of(engine).sync()
    return sorted(s.resumes_from for s in disk_store_of(engine).span_index if s.kind == "budget")


def budgets_of(tree: RadixTree) -> list[BudgetCheckpoint]:
    """Return the checkpoints of budgets in a tree."""
    return [c for n in tree.iter_nodes() for c in n.checkpoints.values() if isinstance(c, BudgetCheckpoint)]


def test_disk_keeps_the_states_that_the_tree_keeps(tmp_path: Path) -> None:
    """What a text outgrows goes from the disk, too, once it is written; where texts part it stays."""
    pauses = Pauses("disk", tmp_path, **options_of("llama", H2O))
    engine = pauses.engine

    def ask_and_write(*args: Any) -> Any:
        answer = ask(engine, *args)
        offloader_of(engine).sync()
        return answer

    turns = talk(H2O, ask_and_write, (70, 17, 30, 45, 20, 10))
    ask_and_write([*turns[1].tokens, 5, 6, 7], H2O)
    tree = engine.cache.prefix_cache.tree
    kept = sorted(state.position for state in budgets_of(tree))
    assert states_of(engine) == kept
    assert len(kept) < len(turns)
    pauses.close()


@pytest.mark.parametrize("tier", ["disk", *slow("ram")])
def test_capacity_counts_states(tier: str, tmp_path: Path) -> None:
    """The least recently used are evicted from a store that is too small, and the newest one is found."""
    spec = f"ram:capacity={2**18}" if tier == "ram" else disk_spec(tmp_path, str(2**18))
    engine = make_engine(prefix_cache="exact", tiers=[spec], **options_of("llama", H2O))
    tree = engine.cache.prefix_cache.tree
    for seed in range(6):
        turns = talk(H2O, partial(ask, engine), (90,), seed=seed)
        tree.evict(tree.num_evictable_pages)
        offloader_of(engine).sync()
    (stats,) = offloader_of(engine).stats()
    assert stats["evicted"] > 0 and 0 < stats["bytes"] <= stats["capacity"]
    assert ask(engine, [*turns[0].tokens, 1], H2O).stats.num_cached_tokens == len(turns[0].tokens) - 1
    engine.cache.prefix_cache.close_offloader()


def test_memory_has_no_state_that_the_pool_has(tmp_path: Path) -> None:
    pauses = Pauses("ram", tmp_path, **options_of("llama", H2O))
    text = begin(H2O, pauses)
    (store,) = offloader_of(pauses.engine).stores
    assert len(spans_of_states(store)) == 2
    ask(pauses.engine, text, H2O)
    assert len(spans_of_states(store)) == 1  # of the first turn
    pauses.close()


def test_answers_that_end_in_one_block_are_all_found(tmp_path: Path) -> None:
    """Texts that share all whole blocks, with states of different lengths behind these."""
    pauses = Pauses("restart", tmp_path, **options_of("llama", H2O))
    prompt = list(range(20, 102))
    ends = []
    for i, n in enumerate((3, 5, 3, 7)):
        text = [*prompt, 10 + i]
        ends.append(ask(pauses.engine, text, H2O, n))
    pauses.pause()
    for turn in ends:
        assert ask(pauses.engine, [*turn.tokens, 1, 2], H2O, 1).stats.num_cached_tokens == len(turn.tokens) - 1
    pauses.close()


@pytest.mark.parametrize("policy", [H2O, *slow("gate:budget=50%", "h2o:budget=40,prefill=stream,chunk=24")])
@pytest.mark.parametrize("kind", ["ram", *slow("disk")])
def test_preempted_answers_go_on_from_a_tier(policy: str, kind: str, tmp_path: Path) -> None:
    """A row that is preempted in its answer, and whose state is evicted before it runs again."""
    pauses = Pauses(kind, tmp_path, **options_of("llama", policy))
    engine = pauses.engine

    def answer(text: list[int], policy: str) -> Request:
        request = make_request(text, 20, policy, num_system_tokens=5)
        engine.add(request)
        while engine.has_unfinished_requests:
            engine.step()
            if request in engine.scheduler.running and request.num_output_tokens in (3, 9, 19):
                engine.scheduler.preempt(request)
                pauses.pause()
            engine.cache.check()
        return request

    turns = talk(policy, answer)
    assert all(r.stats.num_preemptions == 3 for r in turns)
    assert answers(turns) == expected_conversation(policy, "llama")[0]
    assert engine.cache.prefix_cache.hits_by_source()[kind] > 0
    pauses.close()


@pytest.mark.parametrize("policy", ["h2o:budget=30,prefill=stream,chunk=24", *slow("tova:budget=30,prefill=stream")])
def test_streamed_prompts_that_begin_alike_equal_cold_ones_after_a_restart(policy: str, tmp_path: Path) -> None:
    """The ends of chunks are kept in tiers, too."""
    options = options_of("llama", policy)
    pauses = Pauses("restart", tmp_path, **options)
    text = [i * 7 % 128 for i in range(500)][:200]
    ask(pauses.engine, text, policy)
    for prompt in ([*text[:199], 1, 2, 3], [*text, 4, 5, 6, *text[:60]]):
        pauses.pause()
        found = ask(pauses.engine, prompt, policy)
        assert found.output_tokens == ask(make_engine(**options), prompt, policy).output_tokens
        assert found.stats.num_cached_tokens >= 150 or "chunk" not in policy
    pauses.close()


def test_of_a_state_that_another_prompt_cannot_use_only_metadata_are_read(tmp_path: Path) -> None:
    """Which queries of a prompt `snapkv` looks at depends on where the prompt ends."""
    policy = "snapkv:budget=30,prefill=stream,chunk=24"
    pauses = Pauses("restart", tmp_path, **options_of("llama", policy))
    text = [i * 7 % 128 for i in range(200)]
    ask(pauses.engine, text, policy)
    pauses.pause()
    (position, _) = states_of(pauses.engine)
    found = ask(pauses.engine, [*text[: position + 1], *text[:100]], policy)
    assert found.stats.num_cached_tokens == 0
    assert 0 < disk_store_of(pauses.engine).counts["read"] <= 2 * 4096
    assert position in states_of(pauses.engine)
    pauses.close()


def test_states_are_loaded_whole_beside_selective_loading(tmp_path: Path) -> None:
    """A budget goes on from its state where texts without one load important tokens only."""
    options = options_of("llama", H2O)
    tiers = [disk_spec(tmp_path), "ram:capacity=10MB"]
    engine = make_engine(prefix_cache="selective:ratio=0.5", tiers=tiers, max_running_requests=4, **options)
    tree = engine.cache.prefix_cache.tree

    def answer(text: list[int], policy: str) -> Request:
        tree.evict(tree.num_evictable_pages)
        offloader_of(engine).sync()
        return ask(engine, text, policy)

    found = talk(H2O, answer)
    assert answers(found) == expected_conversation(H2O, "llama")[0]
    assert all(r.stats.num_cached_tokens for r in found[1:])
    engine.cache.prefix_cache.close_offloader()


def test_cache_ls_shows_states(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pauses = Pauses("restart", tmp_path, **options_of("llama", H2O))
    text = begin(H2O, pauses, 1)
    pauses.close()
    assert main(["cache", "ls", str(tmp_path / "0")]) == 0
    assert f"budget from {len(text) - 4} " in capsys.readouterr().out
    assert main(["cache", "verify", str(tmp_path / "0")]) == 0


CHATS = [H2O, "gate:budget=50%", "h2o:budget=40,prefill=stream,chunk=24", "sinks:budget=30", H2O]


@pytest.mark.parametrize("family", ["llama", *slow("gemma3_text")])
@pytest.mark.parametrize("seed", [0, *slow(1, 2, 3)])
def test_chats_in_a_small_pool_answer_as_those_that_they_go_on_from(family: str, seed: int, tmp_path: Path) -> None:
    """Together, in tiers that are too small, with restarts: answers are those of the turns that a state has seen."""
    rng = random.Random(seed)
    options = options_of(family, "demote")
    tiers = ["ram:capacity=100kB", disk_spec(tmp_path, "200kB")]

    def open_engine() -> Engine:
        pages = 60 if family == "gemma3_text" else 200
        return make_engine(prefix_cache="exact", num_pages=pages, tiers=tiers, max_running_requests=3, **options)

    engine = open_engine()
    texts: list[list[int]] = [[] for _ in CHATS]
    seen: list[dict[int, list[list[int]]]] = [{0: []} for _ in CHATS]  # of each chat: the prompts before each state
    cached = []
    num_loaded = 0
    for _ in range(4):
        texts = [[*text, *(rng.randrange(128) for _ in range(rng.randint(3, 50)))] for text in texts]
        requests = [
            make_request(text, 8, policy, salt=str(i))
            for i, (text, policy) in enumerate(zip(texts, CHATS, strict=True))
        ]
        engine.add(*requests)
        for _ in iter_steps(engine):
            pass
        for i, (request, policy) in enumerate(zip(requests, CHATS, strict=True)):
            cached.append(request.stats.num_cached_tokens)
            prompts = [*seen[i].get(cached[-1], []), texts[i]]  # pages of a text are not those of a state
            alone = make_engine(prefix_cache="exact", **options)
            expected = [ask(alone, prompt, policy, 8, salt=str(i)) for prompt in prompts][-1]
            assert request.output_tokens == expected.output_tokens
            texts[i] = request.tokens
            seen[i][len(texts[i]) - 1] = prompts
        num_loaded += sum(offloader_of(engine).num_loaded_tokens.values())
        offloader_of(engine).num_loaded_tokens = {"ram": 0, "disk": 0}
        if rng.random() < 0.4:
            offloader_of(engine).sync()
            engine.cache.prefix_cache.close_offloader()
            engine = open_engine()
    assert 0 in cached[5:] and num_loaded > 0, cached
    engine.cache.prefix_cache.close_offloader()


# ---- the format ------------------------------------------------------------------------------------------------------


@cache
def encoded_states() -> list[tuple[str, bytes, BudgetCheckpoint, CheckpointKind]]:
    """Return states of two policies as bytes, with the policies, the states and what decodes them."""
    found = []
    for family, policy in (("gemma3_text", "h2o:budget=25%,demote=int4:50%"), ("llama", "gate:budget=50%")):
        engine = make_engine(prefix_cache="exact", tiers=["ram:capacity=1MB"], **options_of(family, policy))
        talk(policy, partial(ask, engine), (70,))
        prefix_cache = engine.cache.prefix_cache
        (state,) = budgets_of(prefix_cache.tree)
        found.append((policy, encode_state(state), state, prefix_cache.kinds["budget"]))
    return found


def equal_fields(a: Any, b: Any, names: set[str]) -> bool:
    return type(a) is type(b) and all(equal(getattr(a, name), getattr(b, name)) for name in names)


def equal(a: Any, b: Any) -> bool:
    """Compare two values of a state, all fields of dataclasses and all numbers of arrays."""
    if isinstance(a, BudgetPolicy):  # the weights of a gate are no part of the bytes
        return equal_fields(a, b, {f.name for f in fields(a)} - {"weights"})
    if is_dataclass(a):
        return equal_fields(a, b, {f.name for f in fields(a)})
    if isinstance(a, tuple):
        return len(a) == len(b) and all(equal(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, torch.Tensor | np.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and bool((a == b).all())
    return a == b


def test_decoding_is_the_inverse_of_encoding() -> None:
    """But for the pages, which are numbered in the order in which they are written."""
    for policy, data, state, kind in encoded_states():
        shape = kind._shape(state.policy)
        other = policies.parse(policy).resolve(300)  # of a later turn
        decoded = decode_state(data, other, shape, len(state.page_list))
        pages = np.concatenate([run.pages for run in state.runs()])
        restored = with_pages(decoded, pages)
        assert encode_state(restored) == data
        assert restored.page_list.tolist() == state.page_list.tolist()
        assert equal(replace(restored, evictors=(), windows=None), replace(state, evictors=(), windows=None))
        for ours, theirs in zip(restored.evictors, state.evictors, strict=True):
            assert equal(
                replace(ours, pages=ours.counts, demoter=None), replace(theirs, pages=ours.counts, demoter=None)
            )


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_damaged_metadata_are_refused_or_harmless(data: st.DataObject) -> None:
    """Nothing but ValueError is raised, and no page, slot or hole is named that the state does not have."""
    _, encoded, state, kind = data.draw(st.sampled_from(encoded_states()))
    shape = kind._shape(state.policy)
    damaged = bytearray(encoded)
    for _ in range(data.draw(st.integers(1, 4))):
        begin = data.draw(st.sampled_from([0, len(encoded) - 250]))  # names and shapes, or the header at the end
        place = data.draw(st.integers(begin, min(begin + 1000, len(encoded) - 1)))
        damaged[place] = data.draw(st.integers(0, 255))
    damaged = damaged[: data.draw(st.sampled_from([len(damaged), len(damaged), len(damaged) // 2]))]
    try:
        found = decode_state(bytes(damaged), state.policy, shape, len(state.page_list))
    except ValueError:
        return
    assert sorted(found.page_list.tolist()) == list(range(len(state.page_list)))
    for part in found.evictors:
        num_slots = part.counts[..., None] * 16
        assert ((part.hole_places.numpy() >= 0) & (part.hole_places.numpy() < num_slots)).all()
        assert (part.num_tokens <= num_slots[..., 0]).all()
