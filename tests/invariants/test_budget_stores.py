"""What budgets leave in stores: errors are misses, stores keep what the tree keeps, and bytes are read with suspicion.

Their tokens are in tests/invariants/test_checkpoints.py and test_resuming.py.
"""

from __future__ import annotations

import logging
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
from retain.kv.checkpoints.budget import CheckpointKind
from retain.kv.checkpoints.budget.checkpoint import BudgetCheckpoint
from retain.kv.checkpoints.budget.metadata import decode_metadata, encode_metadata, with_pages
from retain.kv.eviction import policies
from retain.kv.eviction.budget import BudgetPolicy
from retain.kv.eviction.gate_weights import Gate
from retain.kv.prefix.radix_tree import RadixTree
from retain.kv.stores.cost_model import LoadCostModel
from retain.kv.stores.span import Span
from retain.kv.stores.tiers.ram import RamStore
from tests.helpers import engines
from tests.helpers.chats import TURNS, answers, ask, options_of, talk, talk_in_one_row
from tests.helpers.engines import make_engine, make_request
from tests.helpers.gates import random_weights
from tests.helpers.marks import slow
from tests.helpers.places import Place
from tests.helpers.tiers import disk_spec, disk_store_of, offloader_of
from tests.helpers.unlike_family import unlike_family as unlike_family

H2O = "h2o:budget=25%"


def spans_of_states(store: RamStore) -> list[Span]:
    """The spans of states in a store in memory: beside them are those of prompts, which have no metadata."""
    return [span for span in store.span_index.spans if span.metadata_bytes]


# ---- misses ----------------------------------------------------------------------------------------------------------


def begin(policy: str, place: Place, turns: int = 2, **more: Any) -> list[int]:
    """Hold the first turns of a conversation. Returns the text of the next one, after a pause."""
    requests = talk(policy, partial(ask, place.engine, **more), TURNS[:turns])
    place.pause()
    return [*requests[-1].tokens, 1, 2, 3]


def test_states_of_another_gate_are_never_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = "gate:budget=50%"
    place = Place("folder after a restart", tmp_path, **options_of("llama", policy))
    text = begin(policy, place, 1)
    group = place.engine.cache.spec.full_attention_group
    sizes = len(group.caches), group.num_kv_heads, group.k_dim, group.v_dim
    with monkeypatch.context() as patch:
        patch.setattr(engines, "random_gate", lambda spec, heads: Gate(random_weights(*sizes, 7)))
        place.restart()
        assert ask(place.engine, text, policy, 1).stats.num_cached_tokens == 0
    place.restart()
    assert ask(place.engine, text, policy, 1).stats.num_cached_tokens == len(text) - 4
    place.close()


READ = "retain.kv.stores.reader.SpanReader.read_blocks"
UPLOAD = "retain.kv.stores.checkpoint_spans.CheckpointSpans.upload"


@pytest.mark.parametrize("error", [MemoryError, *slow(OSError, TimeoutError)])
@pytest.mark.parametrize("call", [UPLOAD, *slow(READ)])
def test_errors_are_misses(
    error: type[Exception], call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Pages that were taken are free again (`ask` has the accountant look), and one line is logged."""
    options = options_of("llama", H2O)
    place = Place("folder after a restart", tmp_path, **options)
    text = begin(H2O, place)

    def fail(*_: object) -> None:
        raise error("broken")

    with monkeypatch.context() as patch:
        patch.setattr(call, fail)
        found = ask(place.engine, text, H2O)
    assert found.stats.num_cached_tokens == 0
    assert found.output_tokens == ask(make_engine(**options), text, H2O).output_tokens
    (warning,) = [r for r in caplog.records if r.levelno == logging.WARNING]
    assert warning.getMessage().startswith(("tier disk: a span", "tier disk: a checkpoint")) and not warning.exc_info
    place.close()


@pytest.mark.parametrize("family", ["llama", *slow("gemma3_text")])
def test_state_that_finds_no_pages_is_a_miss(family: str, tmp_path: Path) -> None:
    """A pool without pages for it; with more of them the state is still there."""
    options = options_of(family, H2O)
    place = Place("folder after a restart", tmp_path, **options)
    text = begin(H2O, place)
    pool = place.engine.cache.pool
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pool, "ensure_free", lambda n: False)
        request = make_request(text, 1, H2O)
        cache = place.engine.cache
        row = cache.open(request.policy, len(text))
        task = request.row_task()
        assert row.start(task, cache.find(request.policy, task)).position == 0
        row.close()
        place.engine.cache.check()
    assert ask(place.engine, text, H2O).stats.num_cached_tokens == len(text) - 4
    place.close()


@pytest.mark.parametrize("position", [b"9", b"1", *slow(b"x")])
def test_metadata_that_make_no_sense_are_a_miss(
    position: bytes, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Where no checksum can tell: in memory. One line is logged, and the span is dropped."""
    options = options_of("llama", H2O)
    place = Place("memory", tmp_path, **options)
    text = begin(H2O, place, 1)
    (store,) = offloader_of(place.engine).stores
    num_spans = store.stats()["spans"]
    (span,) = spans_of_states(store)
    metadata = span.view_metadata(store.bucket.objects[span.name].data)
    at = metadata.tobytes().index(b'"position": ') + len('"position": ')
    metadata[at] = position[0]
    found = ask(place.engine, text, H2O)
    assert found.stats.num_cached_tokens == 0
    assert found.output_tokens == ask(make_engine(**options), text, H2O).output_tokens
    (warning,) = [r for r in caplog.records if r.levelno == logging.WARNING]
    assert not warning.exc_info and store.stats()["spans"] == num_spans - 1
    place.close()


def test_earlier_state_stays_while_a_later_one_is_not_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pool has the state of the first turn, evicts all that it can to read the second one, and fails."""
    options = options_of("llama", H2O)
    place = Place("folder after a restart", tmp_path, **options)
    text = begin(H2O, place)
    engine = place.engine
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
    place.close()


def test_pages_of_the_pool_stay_while_a_state_finds_no_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To read a state the pool evicts the pages that the row begins with where the state finds no room."""
    policy = "window:budget=25%"
    options = options_of("llama", policy)
    place = Place("folder after a restart", tmp_path, **options)
    text = begin(policy, place)
    engine = place.engine
    ask(engine, text[: TURNS[0]], "full")
    tree = engine.cache.prefix_cache.tree
    wanted: list[int] = []  # pages of the state, of its copy, then of what the pool has

    def ensure_free(n: int) -> bool:
        tree.evict_holders(np.arange(1, engine.cache.pool.num_pages))
        wanted.append(n)
        return len(wanted) != 2

    with monkeypatch.context() as patch:
        patch.setattr(engine.cache.pool, "ensure_free", ensure_free)
        found = ask(engine, text, policy)
    assert len(wanted) > 2 and TURNS[0] <= found.stats.num_cached_tokens <= TURNS[0] + 1  # the answer is cached, too
    assert found.output_tokens == ask(make_engine(**options), text, policy).output_tokens
    place.close()


def test_computing_that_is_faster_reads_nothing(tmp_path: Path) -> None:
    place = Place("folder after a restart", tmp_path, **options_of("llama", H2O))
    text = begin(H2O, place)
    model = LoadCostModel()
    offloader_of(place.engine).cost_model = model
    model.record_compute(10**9, 1.0)
    model.record_read("disk", 1, 1.0)
    assert ask(place.engine, text, H2O).stats.num_cached_tokens == 0
    assert disk_store_of(place.engine).counts["read"] == 0
    place.close()


# ---- what is kept ----------------------------------------------------------------------------------------------------


def states_of(engine: Engine) -> list[int]:
    """Return the positions of the states in the last store."""
    offloader_of(engine).sync()
    return sorted(s.resumes_from for s in disk_store_of(engine).span_index.spans if s.kind == "budget")


def budgets_of(tree: RadixTree) -> list[BudgetCheckpoint]:
    """Return the checkpoints of budgets in a tree."""
    return [c for n in tree.iter_nodes() for c in n.checkpoints.values() if isinstance(c, BudgetCheckpoint)]


def test_disk_keeps_the_states_that_the_tree_keeps(tmp_path: Path) -> None:
    """What a text outgrows goes from the disk, too, once it is written; where texts part it stays."""
    place = Place("folder", tmp_path, **options_of("llama", H2O))
    engine = place.engine

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
    place.close()


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
    place = Place("memory", tmp_path, **options_of("llama", H2O))
    text = begin(H2O, place)
    (store,) = offloader_of(place.engine).stores
    assert len(spans_of_states(store)) == 2
    ask(place.engine, text, H2O)
    assert len(spans_of_states(store)) == 1  # of the first turn
    place.close()


def test_answers_that_end_in_one_block_are_all_found(tmp_path: Path) -> None:
    """Texts that share all whole blocks, with states of different lengths behind these."""
    place = Place("folder after a restart", tmp_path, **options_of("llama", H2O))
    prompt = list(range(20, 102))
    ends = []
    for i, n in enumerate((3, 5, 3, 7)):
        text = [*prompt, 10 + i]
        ends.append(ask(place.engine, text, H2O, n))
    place.pause()
    for turn in ends:
        assert ask(place.engine, [*turn.tokens, 1, 2], H2O, 1).stats.num_cached_tokens == len(turn.tokens) - 1
    place.close()


def test_of_a_state_that_another_prompt_cannot_use_only_metadata_are_read(tmp_path: Path) -> None:
    """Which queries of a prompt `snapkv` looks at depends on where the prompt ends."""
    policy = "snapkv:budget=30,prefill=stream,chunk=24"
    place = Place("folder after a restart", tmp_path, **options_of("llama", policy))
    text = [i * 7 % 128 for i in range(200)]
    ask(place.engine, text, policy)
    place.pause()
    (position, _) = states_of(place.engine)
    found = ask(place.engine, [*text[: position + 1], *text[:100]], policy)
    assert found.stats.num_cached_tokens == 0
    assert 0 < disk_store_of(place.engine).counts["read"] <= 2 * 4096
    assert position in states_of(place.engine)
    place.close()


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
    assert answers(found) == talk_in_one_row(H2O, "llama")[0]
    assert all(r.stats.num_cached_tokens for r in found[1:])
    engine.cache.prefix_cache.close_offloader()


def test_cache_ls_shows_states(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = Place("folder after a restart", tmp_path, **options_of("llama", H2O))
    text = begin(H2O, place, 1)
    place.close()
    assert main(["cache", "ls", str(tmp_path / "0")]) == 0
    assert f"budget from {len(text) - 4} " in capsys.readouterr().out
    assert main(["cache", "verify", str(tmp_path / "0")]) == 0


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
        found.append((policy, encode_metadata(state), state, prefix_cache.kinds["budget"]))
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
        decoded = decode_metadata(data, other, shape, len(state.page_list))
        pages = np.concatenate([run.pages for run in state.runs()])
        restored = with_pages(decoded, pages)
        assert encode_metadata(restored) == data
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
        found = decode_metadata(bytes(damaged), state.policy, shape, len(state.page_list))
    except ValueError:
        return
    assert sorted(found.page_list.tolist()) == list(range(len(state.page_list)))
    for part in found.evictors:
        num_slots = part.counts[..., None] * 16
        assert ((part.hole_places.numpy() >= 0) & (part.hole_places.numpy() < num_slots)).all()
        assert (part.num_tokens <= num_slots[..., 0]).all()
