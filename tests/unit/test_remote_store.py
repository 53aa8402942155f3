"""Objects of spans: their format under damage, the circuit breaker, the reader's ranges, and `retain cache`."""

from __future__ import annotations

import json
import os
import sys
from contextlib import closing
from functools import cache
from pathlib import Path
from struct import unpack_from

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from retain.kv.stores import reader
from retain.kv.stores.bucket import ObjectInfo
from retain.kv.stores.circuit_breaker import CircuitBreaker
from retain.kv.stores.span import CorruptionError, Span, SpanFormat
from retain.kv.stores.span_file import (
    FORMAT_VERSION,
    MAGIC,
    PREFIX,
    checksum,
    decode_header,
    encode_header,
    header_size,
    span_name,
)
from retain.kv.stores.tiers import parse
from retain.kv.stores.tiers.remote import RemoteStore
from tests.helpers.cli import run_cli
from tests.helpers.stored_spans import expected_blocks, key_of, make_span

FINGERPRINT = bytes(range(16))
FORMAT = SpanFormat(FINGERPRINT, {"model": "tiny"}, page_bytes=4608)


@cache  # the time that it was made is in the header
def make_object(numbers: range) -> tuple[Span, bytes, ObjectInfo]:
    """A span with the header of its object, and how a store would list it."""
    span, data = make_span(numbers)
    header = encode_header(FORMAT, span, data)
    name = span_name(FINGERPRINT, span.keys, span.is_reordered)
    return span, header, ObjectInfo(name, len(header) + span.size, 1.0)


def open_store(path: Path) -> RemoteStore:
    store = parse(f"remote:url=file://{path},refresh=0.01").open(FORMAT)
    assert isinstance(store, RemoteStore)
    return store


def test_header_describes_the_span() -> None:
    span, header, info = make_object(range(5))
    found, span_format = decode_header(header, info)
    for name in ("keys", "num_blocks", "block_bytes", "start_page", "kind", "offsets", "is_reordered"):
        assert getattr(found, name) == getattr(span, name)
    assert (
        span_format.description == FORMAT.description and found.data_offset == len(header) and len(header) % 4096 == 0
    )


@given(st.data())
def test_no_damage_to_a_header_goes_unnoticed(data: st.DataObject) -> None:
    _, header, info = make_object(range(3))
    size, changed = header_size(header), bytearray(header)
    for _ in range(data.draw(st.integers(1, 3))):
        changed[data.draw(st.integers(0, size - 1))] ^= data.draw(st.integers(1, 255))
    damaged = bytes(changed)[: data.draw(st.integers(0, size))] if data.draw(st.booleans()) else bytes(changed)
    if damaged[:size] != header[:size]:
        with pytest.raises(CorruptionError):
            decode_header(damaged, info)


@given(st.binary(max_size=200))
def test_no_bytes_that_are_no_header_are_taken_for_one(start: bytes) -> None:
    with pytest.raises(CorruptionError):
        decode_header(start, ObjectInfo("a/b/c", len(start), 0.0))


def test_span_of_another_name_format_or_size_is_refused() -> None:
    _, header, info = make_object(range(3))
    other = span_name(FINGERPRINT[::-1], make_span(range(3))[0].keys, False)
    for name, size in ((other, info.size), (info.name, info.size - 1), (info.name[:-1] + "!", info.size)):
        with pytest.raises(CorruptionError):
            decode_header(header, ObjectInfo(name, size, 0.0))


def test_circuit_breaker_waits_longer_after_each_failure_and_closes_after_a_probe() -> None:
    breaker = CircuitBreaker(first=100, longest=350)
    assert not breaker.is_open and breaker.seconds_until_probe is None
    for delay in (100, 200, 350, 350):
        breaker.record_failure()
        assert breaker.is_open and delay - 5 < (breaker.seconds_until_probe or 0) <= delay
        breaker.record_failure()  # of a request that was under way: it changes nothing
        assert (breaker.seconds_until_probe or 0) <= delay
        breaker.close()
        assert not breaker.is_open
    breaker.reset_delay()
    breaker.record_failure()
    assert 95 < (breaker.seconds_until_probe or 0) <= 100


@pytest.mark.parametrize("range_bytes", [1, 6000, 10**9])
def test_blocks_do_not_depend_on_the_size_of_ranges(
    range_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader, "RANGE_BYTES", range_bytes)
    with closing(open_store(tmp_path)) as store:
        store.put(*make_span(range(4), num_layers=5))
        store.sync()
        span, i = store.find(key_of(2)) or pytest.fail("the span is not indexed")
        assert i == 2
        with closing(store.open(span)) as opened:
            for layer in (1, 0, 4, 2, 3, 1):
                assert (opened.read_blocks(layer, 0, 4) == expected_blocks(range(4), layer)).all()
                assert (opened.read_blocks(layer, 1, 3) == expected_blocks(range(1, 3), layer)).all()
            assert opened.read_metadata().size == 0


def test_spans_outlive_a_store_and_are_found_by_others_by_each_key(tmp_path: Path) -> None:
    with closing(open_store(tmp_path)) as store:
        for first in range(0, 30, 10):
            store.put(*make_span(range(first, first + 10)))
    with closing(open_store(tmp_path)) as other:
        other.sync()
        found = [other.find(key_of(n)) for n in range(31)]
    assert found[30] is None and [f[1] for f in found[:30] if f] == [*range(10)] * 3


def test_cache_commands_list_verify_and_sweep_a_bucket(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spec, foreign = f"remote:url=file://{tmp_path}", tmp_path / "letters" / "ab" / "to-mother"
    foreign.parent.mkdir(parents=True)
    foreign.write_text("not a span")
    with closing(open_store(tmp_path)) as store:
        for first in range(0, 30, 10):
            store.put(*make_span(range(first, first + 10)))
    listed = run_cli(capsys, "cache", "ls", spec, "--json")
    records = [json.loads(line) for line in listed.out.splitlines()]
    assert listed.code == 0 and [r["pages"] for r in records] == [10] * 3 and {r["kind"] for r in records} == {"text"}
    intact = run_cli(capsys, "cache", "verify", spec)
    assert intact.code == 0 and intact.out.startswith("3 spans, ") and intact.out.endswith(": all intact\n")
    damaged = tmp_path / records[0]["object"]
    content = np.frombuffer(damaged.read_bytes(), np.uint8).copy()
    content[6000] ^= 1  # of a block: the header takes 4096 bytes
    damaged.write_bytes(content.tobytes())
    verified = run_cli(capsys, "cache", "verify", spec)
    assert verified.code == 1 and "1 were damaged, and are deleted" in verified.out and not damaged.exists()
    swept = run_cli(capsys, "cache", "sweep", spec, "--max-bytes", records[1]["bytes"])
    assert swept.code == 0 and swept.out.startswith("deleted 1 spans") and len(list(tmp_path.rglob("??/*"))) == 2
    assert run_cli(capsys, "cache", "sweep", spec, "--max-age", 0).out.startswith("deleted 1 spans")
    assert run_cli(capsys, "cache", "ls", spec).out == "0 spans, 0.0 MiB\n"
    drafts = [tmp_path / FINGERPRINT.hex() / "ab" / f".{'ab' * 16}.{i:016x}" for i in range(2)]  # of writers
    for draft in drafts:
        draft.parent.mkdir(exist_ok=True)
        draft.write_bytes(b"")
    os.utime(drafts[0], (0, 0))  # its writer was killed
    assert run_cli(capsys, "cache", "sweep", spec).code == 0 and [d.exists() for d in drafts] == [False, True]
    assert foreign.read_text() == "not a span"  # whatever is done with the bucket


@pytest.mark.parametrize(
    ("spec", "problem"),
    [
        ("remote:url=ftp://x/y", "url=ftp://x/y should begin with s3://"),
        ("remote:url=nothing", "should begin with s3://"),
        ("remote:url=memory:///,region=x", "options of s3://"),
    ],
)
def test_bad_options_are_one_line(spec: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem.replace("(", r"\(")) as error:
        parse(spec).open()
    assert len(str(error.value).splitlines()) == 1


def test_without_obstore_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "obstore", None)
    with pytest.raises(ValueError, match=r"pip install 'retain\[remote\]'"):
        parse("remote:url=memory:///").open()


@pytest.mark.parametrize(
    "change",
    [
        {"keys": ""},
        {"num_blocks": [float("inf")] * 3},
        {"block_bytes": -1},
        {"about": 7},
        {"kind": None, "num_blocks": None},
        {"about": json.loads("[" * 500 + "]" * 500)},
    ],
)
def test_a_header_that_makes_no_sense_is_damage(change: dict[str, object]) -> None:
    """Also where its checksum and its name are right: others may write into a bucket."""
    span, header, info = make_object(range(3))
    num_text, num_sums = unpack_from("<II", header, 12)
    fields = json.loads(header[28 : 28 + num_text]) | change
    text, sums = json.dumps(fields).encode(), header[28 + num_text : 28 + num_text + 8 * num_sums]
    keys = () if fields["keys"] == "" else span.keys
    forged = PREFIX.pack(MAGIC, FORMAT_VERSION, len(text), num_sums, checksum(text + sums)) + text + sums
    with pytest.raises(CorruptionError):
        decode_header(forged, ObjectInfo(span_name(FINGERPRINT, keys, False), info.size, 1.0))
