"""Loads the engine of a command."""

from __future__ import annotations

import logging

from retain.config import Config
from retain.llm import LLM

logger = logging.getLogger(__name__)


def load_llm(config: Config) -> LLM:
    """Load an engine and show the progress. Raises ValueError or OSError."""
    llm = LLM(progress=True, **vars(config))
    logger.info("loaded %s in %.1f s, KV pool of %d pages", config.model, llm.load_s, llm.cache.total_pages)
    return llm
