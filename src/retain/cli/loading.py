"""Loads the engine of a command."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence

from retain.config import Config
from retain.kv.eviction import policies
from retain.kv.eviction.auto_policy import AUTO
from retain.llm import LLM
from retain.plugins import parse_spec

logger = logging.getLogger(__name__)


def load_llm(config: Config, drafters: Sequence[str] = ()) -> LLM:
    """Load an engine and show the progress; `drafters` are named later. Raises ValueError or OSError."""
    llm = LLM(progress=True, drafters=drafters, **vars(config))
    if parse_spec(config.kv_policy)[0] == AUTO:
        print(f"--kv-policy {config.kv_policy} is {policies.to_spec(llm.policy)} for this model", file=sys.stderr)
    logger.info("loaded %s in %.1f s, KV pool of %d pages", config.model, llm.load_s, llm.cache.total_pages)
    return llm
