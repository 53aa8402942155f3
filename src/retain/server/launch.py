"""`retain serve`: starts the engine thread and the HTTP server, and drains them on SIGTERM."""

from __future__ import annotations

import asyncio
import gc
import logging
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, cast

import uvicorn

from retain.llm import LLM
from retain.server import hosts
from retain.server.app import create_app
from retain.server.config import DRAFTERS, ServerConfig
from retain.server.drain import GracefulServer, QuietlyCancelled, Watchdog
from retain.server.engine_thread import EngineThread
from retain.server.http_protocol import BoundedHttpProtocol, RejectionLog
from retain.server.observers import open_observers
from retain.server.openai.serving import OpenAIServing
from retain.server.sandbox import MAX_CHARACTERS, Sandbox
from retain.signals import restored_handlers
from retain.threads import reset_cpu_affinity

log = logging.getLogger(__name__)


def serve(
    load_llm: Callable[[], LLM],
    server_config: ServerConfig,
    on_ready: Callable[[GracefulServer], None] | None = None,
    watchdog: Watchdog | None = None,
) -> None:
    """Serve a model until SIGTERM or SIGINT, then finish what was accepted and refuse what comes.

    Calls `on_ready` once the server listens. Signals start the `watchdog`, which goes on when this returns; without one
    only a shutdown that hangs is ended. Raises what `load_llm` raises, ValueError for a server that would be open to
    everybody, and RankError where another rank has ended.
    """
    config = server_config
    hosts.check_exposure(config.host, bool(config.api_keys), config.insecure_no_api_key)
    reset_cpu_affinity()  # OpenMP pinned this thread to a core, which the engine thread would inherit
    sys.setswitchinterval(0.001)  # the engine thread and the event loop share the GIL: keep their turns short
    own_watchdog = Watchdog()
    with ExitStack() as stack:
        stack.callback(own_watchdog.stop)
        stack.enter_context(restored_handlers())
        runner = stack.enter_context(asyncio.Runner(loop_factory=_get_loop_factory()))
        runner.run(_serve(load_llm, server_config, on_ready, watchdog or own_watchdog))


def _get_loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:
        return None
    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory


async def _serve(
    load_llm: Callable[[], LLM],
    server_config: ServerConfig,
    on_ready: Callable[[GracefulServer], None] | None,
    watchdog: Watchdog,
) -> None:
    async with open_service(load_llm, server_config) as service:
        config = uvicorn.Config(
            QuietlyCancelled(create_app(service, service.engine_thread.render_metrics, server_config)),
            host=server_config.host,
            port=server_config.port,
            log_level="warning",
            access_log=False,
            server_header=False,
            http=cast(Any, partial(BoundedHttpProtocol, server_config.limits, RejectionLog())),
            ws="none",
            lifespan="off",
        )
        await GracefulServer(config, service, server_config.drain_timeout, watchdog, on_ready).serve()
        if error := service.engine_thread.rank_error:
            raise error
    log.info("shut down")


async def add_drafters(llm: LLM, engine_thread: EngineThread, config: ServerConfig) -> ServerConfig:
    """Let requests name the drafters of a server. Returns its configuration with those that fit the model.

    Raises ValueError for one that does not, unless every server offers it.
    """
    fitting = []
    for drafter in config.allowed_drafters:
        try:
            await engine_thread.call(partial(llm.add_drafter, drafter))
            fitting.append(drafter)
        except ValueError as error:
            if drafter not in DRAFTERS:
                raise
            log.warning("requests cannot name the drafter %s: %s", drafter, error)
    return replace(config, allowed_drafters=tuple(fitting))


@asynccontextmanager
async def open_service(load_llm: Callable[[], LLM], server_config: ServerConfig) -> AsyncIterator[OpenAIServing]:
    """Run an engine in its thread, to be served from this event loop, until the context ends.

    Raises what `load_llm` raises, and ValueError for a drafter that does not fit the model.
    """
    reset_cpu_affinity()  # OpenMP pinned this thread to a core, which the engine thread would inherit
    with ExitStack() as stack:
        observers = open_observers(server_config, stack)
        engine_thread = EngineThread(load_llm)
        llm = await engine_thread.start()
        limits = server_config.limits
        sandbox = Sandbox(limits.sandbox_timeout, max_characters=max(MAX_CHARACTERS, 2 * limits.max_body_size))
        try:
            server_config = await add_drafters(llm, engine_thread, server_config)
            await engine_thread.observe(observers)
            service = OpenAIServing(llm, engine_thread, server_config, sandbox)
            with existing_objects_frozen():
                yield service
            service.close()
        finally:
            sandbox.close()
            await engine_thread.stop()


@contextmanager
def existing_objects_frozen() -> Iterator[None]:
    """Leave the objects that exist out of garbage collections until the context ends.

    Parsing a large body makes so many objects that all are visited, and nothing else runs meanwhile: half a second for
    those of torch and a model.
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
