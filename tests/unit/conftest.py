"""Engines that the tests of a worker share: loading SmolLM2 takes longer than most tests of it."""

from collections.abc import Callable, Sequence

import pytest

from retain import LLM
from retain.cli import loading
from retain.config import Config
from retain.kv.prefix.cache import PrefixCache

LOADED: dict[Config, LLM] = {}


@pytest.fixture(scope="session")
def load_shared_llm() -> Callable[[Config], LLM]:
    """Load an engine once for each configuration. Its prefix cache is empty each time it is handed out."""
    load_llm = loading.load_llm

    def load(config: Config, drafters: Sequence[str] = ()) -> LLM:
        if config.tier or "selective" in config.prefix_cache:
            return load_llm(config)
        if config not in LOADED:
            LOADED[config] = load_llm(config)
        llm = LOADED[config]
        assert not llm.engine.has_unfinished_requests
        if isinstance(llm.cache.prefix_cache, PrefixCache):
            llm.cache.prefix_cache.tree.clear()
        return llm

    return load


@pytest.fixture
def shared_engines(monkeypatch: pytest.MonkeyPatch, load_shared_llm: Callable[[Config], LLM]) -> None:
    """Commands use the shared engines."""
    monkeypatch.setattr(loading, "load_llm", load_shared_llm)
