"""KV events over sockets: numbered batches, replays, restatements, and addresses that others cannot reach."""

import random
import sys
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager

import msgspec
import numpy as np
import pytest
import zmq

from retain import LLM
from retain.kv.memory.pool import PagePool
from retain.kv.prefix.events import StoredPages
from retain.kv.prefix.radix_tree import RadixTree
from retain.kv.text import Text
from retain.server.config import ServerConfig
from retain.server.launch import serve
from retain.server.observers.kv_events import config, publisher
from retain.server.observers.kv_events.publisher import KVEventPublisher
from tests.helpers.cli import assert_one_line_error, run_cli
from tests.helpers.kv_events import Consumer, tree_content
from tests.server.conftest import HTTP, run_tiny_server, wait_until

S, ROOT = 4, b"root"
ANY_PORT = "tcp://127.0.0.1:0"


class PublishedTree:
    """A tree whose content is published."""

    def __init__(self, published: KVEventPublisher):
        self.queue, self.pool, self.rng = published.queue, PagePool(200), random.Random(1)
        self.tree = RadixTree(self.pool, S)
        self.tree.observer, self.pool.evict_callback = self.queue, self.tree.evict
        self.published = published

    def change(self, num_changes: int, one_batch_each: bool = False) -> None:
        """Insert random texts; the pool is small, so that others are evicted."""
        for _ in range(num_changes):
            text = [self.rng.choice((0, 0, 0, 1)) for _ in range(self.rng.randint(S, 40))]
            n = -(-len(text) // S)
            assert self.pool.ensure_free(n)
            pages = self.pool.allocate(n)
            stored = self.tree.insert(ROOT, Text(text), len(text), pages[None]).stored
            self.pool.free(pages)
            if stored:
                self.queue.on_stored(stored, "")
            if one_batch_each:
                self.wait_published()

    def wait_published(self) -> None:
        wait_until(lambda: not self.queue._pending and not self.queue._must_restate)

    @property
    def content(self) -> set:
        return tree_content(self.tree, {ROOT: ""})


class Subscriber:
    """A consumer with sockets, which asks for a replay where a number is missing."""

    def __init__(self, tree: PublishedTree, max_unread: int = 0):
        """Connect, and change the tree until something comes."""
        self.context, self.consumer, self.next_number, self.num_replays = zmq.Context(), Consumer(S), 0, 0
        self.events = self.context.socket(zmq.SUB)
        self.events.setsockopt(zmq.RCVHWM, max_unread)
        self.events.subscribe(b"")
        self.events.connect(tree.published.endpoint)
        self.replay_endpoint = tree.published.replay_endpoint
        while not self.events.poll(10):
            tree.change(1)
        tree.wait_published()

    def close(self) -> None:
        self.context.destroy(linger=0)

    def receive(self, lost: int = 0, seconds: float = 0.3) -> None:
        """Follow what comes until nothing does; the first `lost` batches get lost."""
        while self.events.poll(seconds * 1000):
            topic, number, payload = self.events.recv_multipart()
            assert topic == b""
            if lost:
                lost -= 1
            elif (n := int.from_bytes(number, "big")) > self.next_number:
                self.replay()
            elif n == self.next_number:
                self.apply(n, payload)

    def apply(self, number: int, payload: bytes) -> None:
        _, events, rank = msgspec.msgpack.decode(payload)
        assert rank == 0
        self.consumer.apply(events)
        self.next_number = number + 1

    def replay(self) -> None:
        self.num_replays += 1
        for number, payload in self.ask(self.next_number):
            self.apply(number, payload)

    def ask(self, start: int) -> Iterator[tuple[int, bytes]]:
        """Ask for all batches from a number on, and yield them with their numbers."""
        with self.context.socket(zmq.DEALER) as socket:
            socket.connect(self.replay_endpoint)
            socket.send_multipart([b"", start.to_bytes(8, "big")])
            while socket.poll(20_000):
                empty, topic, number, payload = socket.recv_multipart()
                assert empty == topic == b""
                if number == b"\xff" * 8:
                    assert payload == b""
                    return
                yield int.from_bytes(number, "big"), payload
        pytest.fail("the replay did not end")


@contextmanager
def published_tree(options: str = "") -> Iterator[PublishedTree]:
    with closing(KVEventPublisher(config.parse(ANY_PORT + options))) as published:
        yield PublishedTree(published)


def test_a_subscriber_knows_what_the_tree_holds() -> None:
    with published_tree() as tree, closing(Subscriber(tree)) as subscriber:
        for _ in range(3):
            tree.change(30)
            tree.wait_published()
            subscriber.receive()
            assert subscriber.consumer.content == tree.content


def test_a_replay_makes_up_for_lost_batches() -> None:
    with published_tree() as tree, closing(Subscriber(tree)) as subscriber:
        subscriber.receive()
        num_replays = subscriber.num_replays
        tree.change(20, one_batch_each=True)
        subscriber.receive(lost=7)
        assert subscriber.num_replays == num_replays + 1 and subscriber.consumer.content == tree.content


def test_a_late_subscriber_replays_from_the_beginning() -> None:
    with published_tree() as tree:
        tree.change(60, one_batch_each=True)
        with closing(Subscriber(tree)) as subscriber:
            subscriber.replay()
            assert subscriber.consumer.content == tree.content


def test_what_is_too_old_to_be_replayed_is_stated_again_once() -> None:
    with published_tree(",buffer=4") as tree:
        tree.change(60, one_batch_each=True)
        with closing(Subscriber(tree)) as subscriber:
            first = tree.published._buffer[0][0]
            assert first > 10
            subscriber.replay()
            assert subscriber.consumer.content == tree.content
            restated = subscriber.next_number
            assert [number for number, _ in subscriber.ask(0)] == [restated - 1], "the restatement is still there"


def test_a_subscriber_that_reads_nothing_delays_nobody(monkeypatch) -> None:
    """It misses what no buffer of its connection holds, and can replay that."""
    monkeypatch.setattr(publisher, "MAX_UNSENT_BATCHES", 1)
    with published_tree() as tree, closing(Subscriber(tree, max_unread=1)) as subscriber:
        tokens = np.arange(160_000)
        for i in range(1, 31):
            tree.queue.on_stored(StoredPages(None, [i.to_bytes(16, "big")], tokens), "")
            tree.wait_published()
        numbers = []
        while subscriber.events.poll(300):
            numbers.append(int.from_bytes(subscriber.events.recv_multipart()[1], "big"))
        replayed = [number for number, _ in subscriber.ask(0)]
        assert len(numbers) < 30 and replayed == list(range(tree.published._next_number))


def test_an_engine_never_waits_for_a_publisher_that_hangs() -> None:
    """What is dropped is counted, and stated again when it goes on."""
    with published_tree() as tree, closing(Subscriber(tree)) as subscriber:
        subscriber.receive()
        taken, go_on = threading.Event(), threading.Event()
        take, tree.queue.max_pending = tree.queue.take, 10

        def hang():
            taken.set()
            assert go_on.wait(60)
            return take()

        tree.queue.take = hang
        tree.change(1)
        assert taken.wait(20)
        tree.change(100)
        assert len(tree.queue._pending) <= 10 and tree.published.counts()["dropped"] > 10
        tree.queue.take = take
        go_on.set()
        tree.wait_published()
        subscriber.receive()
        assert subscriber.consumer.content == tree.content


def test_a_malformed_replay_request_is_ignored() -> None:
    with published_tree() as tree, closing(Subscriber(tree)) as subscriber:
        with subscriber.context.socket(zmq.DEALER) as socket:
            socket.connect(tree.published.replay_endpoint)
            for frames in ([b""], [b"", b"short"], [b"", bytes(8), b"more"]):
                socket.send_multipart(frames)
        tree.change(5)
        subscriber.replay()
        assert subscriber.consumer.content == tree.content


# ---- the option ------------------------------------------------------------------------------------------------------


def test_specs_of_kv_events() -> None:
    parsed = config.parse("tcp://127.0.0.1:5557")
    assert (parsed.endpoint(parsed.port), parsed.replay_port, parsed.topic) == ("tcp://127.0.0.1:5557", 5558, "")
    parsed = config.parse("tcp://[::1]:5557,replay=6000,topic=kv@10.0.0.7:8000@m,buffer=7")
    assert parsed == config.KVEventsConfig("::1", 5557, 6000, 7, "kv@10.0.0.7:8000@m")
    assert parsed.endpoint(0) == "tcp://[::1]:*"
    assert config.parse("tcp://*:5557,insecure=yes").host == "0.0.0.0"


def test_an_address_in_use_is_one_line(capsys) -> None:
    with published_tree() as tree:
        endpoint = tree.published.endpoint
        result = run_cli(capsys, "serve", "--model", "/nowhere", "--kv-events", endpoint)
        assert_one_line_error(result, f"cannot bind {endpoint}: Address already in use")


def test_a_missing_package_is_one_line(capsys, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "zmq", None)  # Python then refuses to import it
    monkeypatch.delitem(sys.modules, "retain.server.observers.kv_events.publisher", raising=False)
    result = run_cli(capsys, "serve", "--model", "/nowhere", "--kv-events", ANY_PORT)
    assert_one_line_error(result, "pip install 'retain[events]'")


def test_nothing_is_published_without_a_prefix_cache() -> None:
    def load_llm():

        return LLM("random:tiny", kv_memory="8MiB", prefix_cache="off")

    with pytest.raises(ValueError, match="there are no events"):
        serve(load_llm, ServerConfig(port=0, kv_events=ANY_PORT))


def test_a_server_that_publishes_nothing_has_no_observer(tiny_server) -> None:
    assert tiny_server.service.llm.cache.prefix_cache.tree.observer is None


def test_events_are_counted_by_metrics() -> None:
    with run_tiny_server(kv_events=ANY_PORT) as server:
        assert server.service.llm.cache.prefix_cache.tree.observer

        HTTP.post(f"{server.url}/completions", json={"model": "smollm2", "prompt": "ab" * 100, "max_tokens": 1})
        metrics = f"{server.url.removesuffix('/v1')}/metrics"
        wait_until(lambda: 'outcome="published"} 2.0' in HTTP.get(metrics).text)
        assert 'outcome="dropped"} 0.0' in HTTP.get(metrics).text


@pytest.mark.parametrize("kind", [zmq.DEALER, zmq.SUB])
def test_a_large_frame_ends_the_connection_that_sends_it(kind: int) -> None:
    """Neither socket keeps what no request needs; others go on."""
    with published_tree() as tree, closing(Subscriber(tree)) as subscriber:
        with subscriber.context.socket(kind) as socket:
            monitor = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
            socket.setsockopt(zmq.RECONNECT_IVL, -1)
            large = bytes(publisher.MAX_REQUEST_BYTES + 1)
            if kind == zmq.SUB:
                socket.connect(tree.published.endpoint)
                socket.subscribe(large)
            else:
                socket.connect(tree.published.replay_endpoint)
                socket.send_multipart([b"", large])
            assert monitor.poll(10_000), "the connection was not closed"
            socket.disable_monitor()
        assert list(subscriber.ask(0))
        tree.change(10)
        tree.wait_published()
        subscriber.receive()
        assert subscriber.consumer.content == tree.content


def test_every_socket_bounds_what_it_receives() -> None:
    with published_tree() as tree:
        for socket in (tree.published._events, tree.published._replays):
            assert 8 < socket.getsockopt(zmq.MAXMSGSIZE) <= 4096 and socket.getsockopt(zmq.RCVHWM) <= 100
