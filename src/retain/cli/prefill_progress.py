"""Shows how far the prompt of a request is computed, as one line of the terminal."""

from __future__ import annotations

import sys
from time import perf_counter
from typing import TextIO

SHOW_AFTER_S = 0.5  # shorter prefills need no line
ERASE_LINE = "\r\x1b[K"


class PrefillProgress:
    """A line such as `prompt: 1024 of 4096 tokens, 812 tokens/s` on a terminal; nothing on other streams."""

    def __init__(self, file: TextIO | None = None) -> None:
        self.file = file or sys.stderr
        self._enabled = self.file.isatty()
        self._started_at = perf_counter()
        self._first: int | None = None
        self._visible = False

    def update(self, num_computed: int, num_tokens: int) -> None:
        """Show that `num_computed` of `num_tokens` tokens are computed. The speed leaves out what was cached."""
        elapsed = perf_counter() - self._started_at
        if self._first is None:
            self._first = num_computed
            self._started_at = perf_counter()
            elapsed = 0.0
        if not self._enabled or elapsed < SHOW_AFTER_S:
            return
        speed = (num_computed - self._first) / elapsed
        self._write(f"{ERASE_LINE}prompt: {num_computed} of {num_tokens} tokens, {speed:.0f} tokens/s")
        self._visible = True

    def erase(self) -> None:
        """Erase the line, before the answer is printed."""
        if self._visible:
            self._write(ERASE_LINE)
            self._visible = False

    def _write(self, text: str) -> None:
        self.file.write(text)
        self.file.flush()
