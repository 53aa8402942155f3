"""Law 4 for object stores: what another engine stored changes no token, and neither does any fault of a store."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest

from retain.engine.engine import Engine
from retain.kv.stores.cost_model import LoadCostModel
from retain.kv.stores.tiers import parse
from retain.kv.stores.tiers.remote import RemoteStore
from tests.helpers.engines import iter_steps, make_engine, make_request, run_to_completion
from tests.helpers.fake_s3 import FakeS3
from tests.helpers.marks import slow
from tests.helpers.related_requests import related_prompts
from tests.helpers.tiers import clear_pool, offloader_of

Texts = list[list[int]]
FAMILIES = ["gemma3_text", *slow("llama", "mpt")]


def s3_spec(s3: FakeS3, timeout: float = 5) -> str:
    return f"remote:url=s3://bucket/kv,endpoint={s3.url},region=us-east-1,timeout={timeout},refresh=0.01"


def open_engine(spec: str, family: str = "llama", prefix_cache: str = "exact") -> Engine:
    return make_engine(family, backend="cpu", prefix_cache=prefix_cache, tiers=[spec])


def store_of(engine: Engine) -> RemoteStore:
    store = offloader_of(engine).stores[-1]
    assert isinstance(store, RemoteStore)
    return store


def close(engine: Engine) -> None:
    engine.cache.prefix_cache.close_offloader()


def run_one_by_one(engine: Engine, prompts: Texts) -> Texts:
    return [run_to_completion(engine, [make_request(t)])[0] for t in prompts]


@pytest.fixture
def filled(s3: FakeS3) -> tuple[Texts, Texts]:
    """Prompts and their answers, whose spans an engine has put into the store."""
    prompts = related_prompts(1, num_prompts=7)
    answers = run_one_by_one(make_engine("llama", backend="cpu"), prompts)
    engine = open_engine(s3_spec(s3))
    assert run_one_by_one(engine, prompts) == answers
    store_of(engine).sync()
    close(engine)
    assert s3.objects
    s3.requests.clear()
    return prompts, answers


def test_a_miss_asks_for_a_listing_so_that_the_next_request_hits(s3: FakeS3) -> None:
    text = list(range(100))
    reader, writer = open_engine(s3_spec(s3)), open_engine(s3_spec(s3))
    store_of(reader).sync()
    expected = run_to_completion(writer, [make_request(text)])
    store_of(writer).sync()
    assert run_to_completion(reader, [make_request(text)]) == expected
    assert store_of(reader).counts["read"] == 0
    store_of(reader).sync()
    clear_pool(reader)
    assert run_to_completion(reader, [make_request(text)]) == expected
    assert store_of(reader).counts["read"] > 0
    close(reader)
    close(writer)


def test_two_writers_of_one_text_store_it_once(s3: FakeS3) -> None:
    engines = [open_engine(s3_spec(s3).replace("refresh=0.01", "refresh=1000")) for _ in range(2)]
    for engine in engines:
        store_of(engine).sync()  # both have seen an empty store
    answers = []
    for engine in engines:
        answers.append(run_to_completion(engine, [make_request(list(range(100)))]))
        store_of(engine).sync()  # it has written before the other one does
    assert answers[0] == answers[1]
    written = [store_of(engine).counts for engine in engines]
    assert written[0]["written"] > 0 and written[1]["written"] == 0 and written[1]["known"] > 0
    for engine in engines:
        close(engine)


# ---- faults ------------------------------------------------------------------------------------------------------


def answer_with(status: int) -> Callable[[FakeS3], None]:
    return lambda s3: setattr(s3, "status", status)


def swap_objects(s3: FakeS3) -> None:
    """Give every object the content of another one, so that a valid span has a wrong name."""
    names = list(s3.objects)
    contents = [s3.objects[name] for name in names]
    for name, content in zip(names, contents[1:] + contents[:1], strict=True):
        s3.objects[name] = content


def cut_objects(s3: FakeS3) -> None:
    for name, content in s3.objects.items():
        s3.objects[name] = content[: len(content) - 5000]


def switch(name: str, value: object = True) -> Callable[[FakeS3], None]:
    return lambda s3: setattr(s3, name, value)


FAULTS: dict[str, Callable[[FakeS3], None]] = {
    "hangs": switch("hangs"),
    "drips": switch("drips"),
    "500": answer_with(500),
    "503": answer_with(503),
    "429": answer_with(429),
    "403": answer_with(403),  # a wrong secret
    "cuts bodies": switch("cuts"),
    "flips bits": switch("flips"),
    "gone after a read": switch("reads_until_failure", 2),
    "deleted": lambda s3: s3.objects.clear(),
    "foreign": swap_objects,
    "truncated": cut_objects,
}


@pytest.mark.parametrize("fault", ["drips", "flips bits", *slow(*sorted({*FAULTS} - {"drips", "flips bits"}))])
@pytest.mark.parametrize("since", ["listing", *slow("start")])
def test_no_fault_changes_a_token(fault: str, since: str, s3: FakeS3, filled: tuple[Texts, Texts]) -> None:
    """From the start, and after the engine knows what the store has. When the fault ends, the store is used again."""
    prompts, answers = filled
    before = dict(s3.objects)
    if since == "start":
        FAULTS[fault](s3)
    engine = open_engine(s3_spec(s3, timeout=0.3))
    store = store_of(engine)
    store.breaker.first = store.breaker.delay = store.breaker.longest = 0.05
    store.wait_listed(2)
    FAULTS[fault](s3)
    assert run_one_by_one(engine, prompts) == answers
    clear_pool(engine)
    assert run_to_completion(engine, [make_request(t) for t in prompts]) == answers
    s3.status, s3.reads_until_failure = None, None
    s3.hangs = s3.drips = s3.cuts = s3.flips = False
    s3.released.set()
    if fault not in ("flips bits", "cuts bodies"):
        s3.objects.update(before)
    while store.breaker.is_open:
        store.wait_listed(1)
    store.sync()
    clear_pool(engine)
    assert run_one_by_one(engine, prompts) == answers
    close(engine)
    other = open_engine(s3_spec(s3))
    store_of(other).sync()
    assert run_one_by_one(other, prompts) == answers
    assert store_of(other).counts["read"] > 0
    close(other)


def test_store_that_is_away_costs_no_token_and_is_reported_once(s3: FakeS3, caplog: pytest.LogCaptureFixture) -> None:
    prompts = related_prompts(1)
    answers = run_one_by_one(make_engine("llama", backend="cpu"), prompts)
    engine = open_engine(re.sub(r":\d+,", ":9,", s3_spec(s3, timeout=0.3)))  # nobody listens there
    assert run_one_by_one(engine, prompts) == answers
    store_of(engine).wait_listed(5)
    assert store_of(engine).breaker.is_open and store_of(engine).stats()["spans"] == 0
    close(engine)
    warnings = [r.getMessage() for r in caplog.records if "cannot list" in r.getMessage()]
    assert warnings and all(len(w.splitlines()) == 1 for w in warnings)


@pytest.mark.parametrize("status", [403, 507])
def test_store_that_takes_no_writes_is_still_read(status: int, s3: FakeS3, filled: tuple[Texts, Texts]) -> None:
    prompts, answers = filled
    s3.put_status = status
    engine = open_engine(s3_spec(s3))
    store_of(engine).sync()
    assert run_one_by_one(engine, prompts) == answers
    assert store_of(engine).counts["read"] > 0
    run_to_completion(engine, [make_request([9, *t]) for t in prompts])
    store_of(engine).sync()
    assert store_of(engine).counts["failed"] > 0 and store_of(engine).counts["written"] == 0
    close(engine)


def test_bytes_that_come_too_late_land_in_no_page(s3: FakeS3, filled: tuple[Texts, Texts]) -> None:
    """A read hangs until its request was computed, and the pages that it should have filled belong to others."""
    prompts, answers = filled
    engine = open_engine(s3_spec(s3, timeout=20))
    store = store_of(engine)
    store.sync()
    gate, read = threading.Event(), store.bucket.get
    store.bucket.get = lambda *args: gate.wait(20) and read(*args)  # type: ignore[method-assign, return-value]
    longest = max(prompts, key=len)
    assert run_to_completion(engine, [make_request(longest)])[0] == answers[prompts.index(longest)]
    requests = [make_request(t) for t in prompts]
    engine.add(*requests)
    for step in iter_steps(engine):
        if step == 2:
            gate.set()
    assert [r.output_tokens for r in requests] == answers
    close(engine)


# ---- selective loading ---------------------------------------------------------------------------------------------


def test_selective_loads_read_no_byte_twice(s3: FakeS3) -> None:
    """First the blocks that had the most attention, then those that the queries need."""
    text = [7 * i % 128 for i in range(400)]
    engine = open_engine(s3_spec(s3), prefix_cache="selective:ratio=0.25")
    for _ in range(3):
        clear_pool(engine)
        run_to_completion(engine, [make_request(text)])
        offloader_of(engine).sync()
    (span,) = store_of(engine).span_index.spans
    assert span.is_reordered
    s3.requests.clear()
    clear_pool(engine)
    run_to_completion(engine, [make_request(text)])
    ranges = [tuple(map(int, m[1].split("-"))) for r in s3.requests if (m := re.search(r"GET .*bytes=(\d+-\d+)", r))]
    ranges = [r for r in ranges if r[0] > 0]  # no headers
    assert len(ranges) > span.num_blocks.count(25)
    assert all(begin > end for (_, end), (begin, _) in pairwise(sorted(ranges)))
    close(engine)


@pytest.mark.parametrize("compute_seconds", [0.0, 0.1, 10.0])
def test_load_that_fails_costs_at_most_a_fifth_of_computing(compute_seconds: float, tmp_path: Path) -> None:
    store = parse(f"remote:url=file://{tmp_path}").open()
    limit = store.time_limit(compute_seconds)
    assert limit + compute_seconds <= 1.2 * compute_seconds + 0.5
    model = LoadCostModel()
    model.record_compute(1000, 1.0)
    model.record_read("remote", 10**6, 1.0)
    assert model.should_load({"remote": int(0.9e6 * limit)}, 10**6, 0.0, limit)
    assert not model.should_load({"remote": int(1.1e6 * limit)}, 10**6, 0.0, limit)
    assert not model.should_load({"remote": int(0.9e6 * limit)}, 10**6, 0.2 * limit, limit)
    store.close()
