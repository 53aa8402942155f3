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

from retain.llm import LLM
from retain.server.admission import Limits
from retain.server.app import create_app
from retain.server.auth import ApiKeys
from retain.server.engine_thread import EngineThread
from retain.server.inspector.recorder import Inspector
from retain.server.metrics import Metrics
from retain.server.openai.serving import OpenAIServing
from retain.threads import reset_cpu_affinity


@dataclass(frozen=True)
class ServerConfig:
    """Where and for whom to serve. `drafters`: whom requests may ask for."""

    host: str = "127.0.0.1"
    port: int = 8000
    served_model_name: str = "model"
    api_keys: ApiKeys = field(default_factory=lambda: ApiKeys({}))
    limits: Limits = field(default_factory=Limits)
    cors_origins: Sequence[str] = ()
    drafters: Sequence[str] = ()
    enable_inspector: bool = False  # /inspect is there; watching costs a little
    metrics_prefix: str = "retain_"  # vllm: makes dashboards for vLLM show us
    shutdown_timeout: int = 300  # for what runs to end, once nobody new is let in


def print_url(server: GracefulServer) -> None:
    """Where it listens, on stderr."""
    print(f"retain: {server.service.model_name} at {server.url}", file=sys.stderr, flush=True)


def serve(
    load_llm: Callable[[], LLM], server_config: ServerConfig, on_ready: Callable[[GracefulServer], None] = print_url
) -> None:
    """Until SIGTERM or SIGINT; then what runs is finished, and what waits is refused. `told` when it listens.

    Raises what `make` raises.
    """
    sys.setswitchinterval(0.001)  # the engine and the event loop take turns; neither waits for the other for long
    with asyncio.Runner(loop_factory=_get_loop_factory()) as runner:
        runner.run(_serve(load_llm, server_config, on_ready))


def _get_loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:
        return None
    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory


async def _serve(
    load_llm: Callable[[], LLM], server_config: ServerConfig, on_ready: Callable[[GracefulServer], None]
) -> None:
    reset_cpu_affinity()  # OpenMP pins threads to cores, and the engine's thread is not this one
    worker = EngineThread(load_llm)
    llm = await worker.start()
    try:
        for drafter in server_config.drafters:
            await worker.call(partial(llm.add_drafter, drafter))
        metrics = Metrics(llm, server_config.metrics_prefix)
        worker.observers.append(metrics)
        inspector = Inspector(llm) if server_config.enable_inspector else None
        if inspector:
            worker.observers.append(inspector)
        service = OpenAIServing(
            llm, worker, server_config.limits, server_config.served_model_name, server_config.drafters
        )
        config = uvicorn.Config(
            create_app(service, metrics, server_config.api_keys, server_config.cors_origins, inspector),
            host=server_config.host,
            port=server_config.port,
            log_level="warning",
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=server_config.shutdown_timeout,
        )
        await GracefulServer(config, service, on_ready).serve()
    finally:
        await worker.stop()


class GracefulServer(uvicorn.Server):
    """Told to end, it lets nobody in, refuses who waits, and finishes what runs. Told twice, it ends."""

    def __init__(self, config: uvicorn.Config, service: OpenAIServing, on_ready: Callable[[GracefulServer], None]):
        super().__init__(config)
        self.service, self.on_ready = service, on_ready

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A signal came."""
        self.force_exit = self.should_exit
        if not self.should_exit:
            self.should_exit = self.service.admission.closed = True
            self.service.engine_thread.reject_waiting()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """It listens."""
        await super().startup(sockets)
        if self.started:
            self.on_ready(self)

    @property
    def url(self) -> str:
        """What clients call its base."""
        host, port = self.servers[0].sockets[0].getsockname()[:2]
        return f"http://{f'[{host}]' if ':' in host else host}:{port}/v1"
