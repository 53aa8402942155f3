"""The publisher of KV events: a thread with two ZeroMQ sockets, one that publishes and one that replays.

Frames of a batch are `topic, sequence number, payload`, and numbers begin at 0. A subscriber that misses one asks the
replay socket for all from that number on. What is too old to be kept is repaired by a restatement: AllBlocksCleared,
then everything that is cached.

This module needs the packages of `retain[events]`.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections import deque
from contextlib import suppress
from itertools import islice

import msgspec
import zmq

from retain.kv.manager import KVCacheManager
from retain.server.observers.kv_events.config import KVEventsConfig
from retain.server.observers.kv_events.queue import KVEventQueue
from retain.server.observers.kv_events.wire import END_OF_REPLAY, encode_sequence_number

log = logging.getLogger(__name__)
MAX_BATCH_EVENTS = 256
MAX_BUFFER_BYTES = 64 * 2**20
MAX_UNSENT_BATCHES = 1000  # of one subscriber; beyond them it misses batches, and asks for a replay
MAX_REQUEST_BYTES = 1024  # of a frame that a client sends: a topic, or the number of a batch; else it is cut off
MAX_UNREAD_REQUESTS = 16  # of a client; it waits then
DATA_PARALLEL_RANK = 0


class KVEventPublisher:
    """Publishes what a prefix cache holds, until it is closed. Raises ValueError where an address cannot be bound.

    `queue` is the observer of the cache.
    """

    def __init__(self, config: KVEventsConfig):
        self.config = config
        self._wake_receiver, self._wake_sender = socket.socketpair()
        self._wake_receiver.setblocking(False)
        self._wake_sender.setblocking(False)
        self.queue = KVEventQueue(self._wake)
        self._closing = False
        self._context = zmq.Context()
        try:
            self._events = self._bind(zmq.PUB, config.port, MAX_UNSENT_BATCHES)
            self._replays = self._bind(zmq.ROUTER, config.replay_port, 2 * (config.buffer + 1))
        except ValueError:
            self._close_sockets()
            raise
        self.endpoint = self._events.getsockopt_string(zmq.LAST_ENDPOINT)
        self.replay_endpoint = self._replays.getsockopt_string(zmq.LAST_ENDPOINT)
        self._topic = config.topic.encode()
        self._buffer: deque[tuple[int, bytes]] = deque()  # sequence number, payload
        self._buffer_bytes = 0
        self._next_number = 0
        self._restated_at = 0  # sequence number of the newest restatement
        self.num_events = 0
        self._thread = threading.Thread(target=self._run, name="retain-kv-events", daemon=True)
        self._thread.start()
        log.info("publishing KV events at %s, replays at %s", self.endpoint, self.replay_endpoint)

    def _bind(self, kind: int, port: int, high_water_mark: int) -> zmq.Socket[bytes]:
        bound: zmq.Socket[bytes] = self._context.socket(kind)
        bound.setsockopt(zmq.SNDHWM, high_water_mark)
        bound.setsockopt(zmq.RCVHWM, MAX_UNREAD_REQUESTS)
        bound.setsockopt(zmq.MAXMSGSIZE, MAX_REQUEST_BYTES)
        bound.setsockopt(zmq.LINGER, 0)
        bound.setsockopt(zmq.IPV6, self.config.is_ipv6)
        endpoint = self.config.endpoint(port)
        try:
            bound.bind(endpoint)
        except zmq.ZMQError as error:
            bound.close()
            raise ValueError(f"--kv-events cannot bind {endpoint}: {error}") from None
        return bound

    def counts(self) -> dict[str, int]:
        """Return how many events were published, and dropped because the thread could not follow."""
        return {"published": self.num_events, "dropped": self.queue.num_dropped}

    def follow(self, cache: KVCacheManager) -> None:
        """Publish what a cache holds from now on. Call it in the thread of its engine. Raises ValueError."""
        cache.prefix_cache.set_observer(self.queue)

    def close(self) -> None:
        """Stop publishing and free the addresses."""
        self._closing = True
        self._wake()
        self._thread.join()
        self._close_sockets()

    def _close_sockets(self) -> None:
        self._context.destroy()
        self._wake_receiver.close()
        self._wake_sender.close()

    def _wake(self) -> None:
        with suppress(OSError):  # full: the thread is awake already; closed: there is none
            self._wake_sender.send(b"\0")

    # ---- in the thread -------------------------------------------------------------------------------------------

    def _run(self) -> None:
        poller = zmq.Poller()
        for source in (self._wake_receiver, self._replays):
            poller.register(source, zmq.POLLIN)
        try:
            while not self._closing:
                self._publish()
                ready = [source for source, _ in poller.poll()]
                if self._replays in ready:
                    self._answer_replay()
                with suppress(BlockingIOError):
                    self._wake_receiver.recv(4096)
        except Exception:
            log.exception("KV events ended: gateways do not know any more what is cached here")

    def _publish(self) -> None:
        """Send what was recorded, in batches."""
        events, is_restatement = self.queue.take()
        if is_restatement:
            self._restated_at = self._next_number
        while batch := list(islice(events, MAX_BATCH_EVENTS)):
            self.num_events += len(batch)
            payload = msgspec.msgpack.encode([time.time(), batch, DATA_PARALLEL_RANK])
            number = self._next_number
            self._next_number = self._next_number + 1
            self._keep(number, payload)
            self._events.send_multipart([self._topic, encode_sequence_number(number), payload])  # never waits

    def _keep(self, number: int, payload: bytes) -> None:
        self._buffer.append((number, payload))
        self._buffer_bytes += len(payload)
        while len(self._buffer) > self.config.buffer or self._buffer_bytes > MAX_BUFFER_BYTES:
            self._buffer_bytes -= len(self._buffer.popleft()[1])

    def _answer_replay(self) -> None:
        """Repeat all batches from a number on."""
        client, *rest = self._replays.recv_multipart()
        if len(rest) != 2 or len(rest[1]) != 8:
            return
        start = int.from_bytes(rest[1], "big")
        oldest = self._buffer[0][0] if self._buffer else self._next_number
        if start < oldest:  # what is kept is not enough without a restatement
            if self._restated_at < oldest:
                self.queue.restate()
                self._publish()
            start = self._restated_at
        for number, payload in self._buffer:
            if number >= start:
                frames = [client, b"", self._topic, encode_sequence_number(number), payload]
                self._replays.send_multipart(frames)
        self._replays.send_multipart([client, b"", b"", END_OF_REPLAY, b""])
