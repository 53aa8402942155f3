"""docs/design/stores.md is complete: a reader that was written from it alone reads every file that engines write."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from retain.kv.checkpoints import Demand
from retain.kv.eviction import policies
from retain.kv.stores.span import Span, SpanFormat, alloc_aligned
from retain.kv.stores.store import Store
from retain.kv.stores.tiers import parse
from tests.helpers.engines import make_engine, make_request, run_to_completion
from tests.helpers.fake_s3 import FakeS3
from tests.helpers.span_reader import ReadSpan, read_span
from tests.helpers.stored_spans import key_of, span_files
from tests.helpers.tiers import offloader_of

ENGINES = {
    "text": ("llama", "full", "exact"),
    "windows_and_states": ("gemma3_text", "full", "exact"),
    "budget": ("llama", "h2o:budget=64", "exact"),
    "importance": ("llama", "full", "selective:ratio=0.5"),
}


def read_place(place: str, path: Path, s3: FakeS3) -> dict[str, bytes]:
    """Every file of a store by its name."""
    if place == "s3":
        return {name.removeprefix("kv/"): content for name, content in s3.objects.items()}
    return {str(file.relative_to(path)): file.read_bytes() for file in span_files(path)}


def spec_of(place: str, path: Path, s3: FakeS3) -> str:
    if place == "disk":
        return f"disk:path={path},capacity=1GB"
    url = f"s3://bucket/kv,endpoint={s3.url},region=x" if place == "s3" else f"file://{path}"
    return f"remote:url={url},refresh=0.01"


@pytest.mark.parametrize("place", ["disk", "file", "s3"])
@pytest.mark.parametrize("kind", ENGINES)
def test_a_reader_from_the_page_alone_reads_every_file(kind: str, place: str, tmp_path: Path, s3: FakeS3) -> None:
    family, policy, prefix_cache = ENGINES[kind]
    tiers = [spec_of(place, tmp_path, s3)]
    engine = make_engine(family, backend="cpu", prefix_cache=prefix_cache, tiers=tiers)
    for _ in range(3):  # a span is reordered after a load
        engine.cache.prefix_cache.tree.clear()
        run_to_completion(engine, [make_request([7 * i % 128 for i in range(200)], 4, policy)])
        offloader_of(engine).sync()
    store = offloader_of(engine).stores[0]
    assert isinstance(store, Store)
    files = read_place(place, tmp_path, s3)
    known = {name.rpartition("kv/")[2]: span for name, span in store.catalog.span_of_name.items()}
    assert files and set(known) <= set(files)
    kinds = set()
    for name, content in files.items():
        found = read_span(name, content)
        kinds.add("importance" if found.fields["is_reordered"] else found.fields["kind"])
        if name in known:
            check_equal(store, known[name], found)
    assert kind in kinds
    engine.cache.prefix_cache.close_offloader()


def check_equal(store: Store, span: Span, found: ReadSpan) -> None:
    """What the page's reader read is what the engine reads."""
    assert (tuple(found.keys), tuple(map(len, found.layers))) == (span.keys, span.num_blocks)
    own = (span.kind, span.start_page, span.resumes_from, span.is_reordered)
    assert own == tuple(found.fields[x] for x in ("kind", "start_page", "resumes_from", "is_reordered"))
    with closing(store.open(span)) as reader:
        for layer, blocks in enumerate(found.layers):
            if blocks:
                assert b"".join(blocks) == reader.read_blocks(layer, 0, len(blocks)).tobytes()
        assert found.metadata == reader.read_metadata().tobytes()


@pytest.mark.parametrize("place", ["disk", "file", "s3"])
def test_a_kind_that_stores_do_not_know_goes_through_all_of_them(place: str, tmp_path: Path, s3: FakeS3) -> None:
    span = Span((key_of(1), key_of(2)), (2, 0, 1), 1000, 5, kind="counter", resumes_from=321, metadata_bytes=11)
    data = alloc_aligned(span.size)
    rng = np.random.default_rng(0)
    for layer in range(3):
        span.view_layer(data, layer)[:] = rng.integers(0, 256, span.view_layer(data, layer).shape, np.uint8)
    span.view_metadata(data)[:] = np.frombuffer(b"of position", np.uint8)
    span_format = SpanFormat(bytes(range(16)), {"model": "tiny"}, 4096)
    with closing(parse(spec_of(place, tmp_path, s3)).open(span_format)) as store:
        store.put(span, data)
        store.sync()
    with closing(parse(spec_of(place, tmp_path, s3)).open(span_format)) as store:
        store.sync()
        stored, i = store.find(key_of(2)) or pytest.fail("it is not found")
        assert i == 1
        ((name, content),) = read_place(place, tmp_path, s3).items()
        found = read_span(name, content)
        check_equal(store, stored, found)
    assert (found.metadata, found.fields["kind"], found.fields["resumes_from"]) == (b"of position", "counter", 321)
    assert found.layers[0][1] == span.view_layer(data, 0)[1].tobytes()
    damaged = bytearray(content)
    damaged[-4096] ^= 1  # of the metadata
    with pytest.raises(ValueError, match="damaged"):
        read_span(name, bytes(damaged))


@pytest.mark.parametrize("num_blocks", [(5, 5), (1, 4), (0, 1), (1,), (1, 1, 1)])
def test_windows_of_other_pages_are_refused(num_blocks: tuple[int, ...]) -> None:
    """A header that was written by somebody else may say anything; a window of 16 tokens at 64 has one page."""
    engine = make_engine("gemma3_text", prefix_cache="exact")
    kind = engine.cache.prefix_cache.kinds["windows_and_states"]
    demand = Demand(policies.parse("full"))
    with pytest.raises(ValueError):
        kind.from_span(demand, 64, Span((bytes(16),), num_blocks, 64), b"")
    assert kind.from_span(demand, 64, Span((bytes(16),), (1, 1), 64), b"").page_list.tolist() == [0, 1]
