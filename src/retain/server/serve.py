"""`retain serve`: an engine, its worker, the app on uvicorn, how they begin and end. Not known here: routes."""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import FrameType

import uvicorn

from retain.kv.span import reset_cpu_affinity
from retain.llm import LLM
from retain.server.app import app
from retain.server.inspector import Inspector
from retain.server.keys import Keys
from retain.server.limits import Limits
from retain.server.metrics import Metrics
from retain.server.service import Service
from retain.server.worker import Worker


@dataclass(frozen=True)
class Place:
    """Where and for whom to serve. `drafters`: whom requests may ask for."""

    host: str = "127.0.0.1"
    port: int = 8000
    name: str = "model"
    keys: Keys = field(default_factory=lambda: Keys({}))
    limits: Limits = field(default_factory=Limits)
    cors: Sequence[str] = ()
    drafters: Sequence[str] = ()
    inspect: bool = False  # /inspect is there; watching costs a little
    metrics_prefix: str = "retain_"  # vllm: makes dashboards for vLLM show us
    drain_s: int = 300  # for what runs to end, once nobody new is let in


def announce(server: Draining) -> None:
    """Where it listens, on stderr."""
    print(f"retain: {server.service.name} at {server.url}", file=sys.stderr, flush=True)


def serve(make: Callable[[], LLM], place: Place, told: Callable[[Draining], None] = announce) -> None:
    """Until SIGTERM or SIGINT; then what runs is finished, and what waits is refused. `told` when it listens.

    Raises what `make` raises.
    """
    sys.setswitchinterval(0.001)  # the engine and the event loop take turns; neither waits for the other for long
    with asyncio.Runner(loop_factory=_loop()) as runner:
        runner.run(_serve(make, place, told))


def _loop() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:
        return None
    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory


async def _serve(make: Callable[[], LLM], place: Place, told: Callable[[Draining], None]) -> None:
    reset_cpu_affinity()  # OpenMP pins threads to cores, and the engine's thread is not this one
    worker = Worker(make)
    llm = await worker.start()
    try:
        for drafter in place.drafters:
            await worker.call(partial(llm.add_drafter, drafter))
        metrics = Metrics(llm, place.metrics_prefix)
        worker.observers.append(metrics)
        inspector = Inspector(llm) if place.inspect else None
        if inspector:
            worker.observers.append(inspector)
        service = Service(llm, worker, place.limits, place.name, place.drafters)
        config = uvicorn.Config(
            app(service, metrics, place.keys, place.cors, inspector),
            host=place.host,
            port=place.port,
            log_level="warning",
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=place.drain_s,
        )
        await Draining(config, service, told).serve()
    finally:
        await worker.stop()


class Draining(uvicorn.Server):
    """Told to end, it lets nobody in, refuses who waits, and finishes what runs. Told twice, it ends."""

    def __init__(self, config: uvicorn.Config, service: Service, told: Callable[[Draining], None]):
        super().__init__(config)
        self.service, self.told = service, told

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A signal came."""
        self.force_exit = self.should_exit
        if not self.should_exit:
            self.should_exit = self.service.gate.closed = True
            self.service.worker.refuse()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """It listens."""
        await super().startup(sockets)
        if self.started:
            self.told(self)

    @property
    def url(self) -> str:
        """What clients call its base."""
        host, port = self.servers[0].sockets[0].getsockname()[:2]
        return f"http://{f'[{host}]' if ':' in host else host}:{port}/v1"
