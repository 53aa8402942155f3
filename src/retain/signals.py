"""Signals that end a process: the first one asks for it, the next one ends it. Only the main thread handles them."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

END_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def is_main_thread() -> bool:
    """Whether the current thread may set handlers of signals."""
    return threading.current_thread() is threading.main_thread()


def end_at_next_signal() -> None:
    """Let the next signal end the process, without output, even while Python exits or a kernel computes."""
    if is_main_thread():
        for number in END_SIGNALS:
            signal.signal(number, signal.SIG_DFL)


@contextmanager
def restored_handlers() -> Iterator[None]:
    """Restore the handlers of these signals when the block ends."""
    if not is_main_thread():
        yield
        return
    handlers = {number: signal.getsignal(number) for number in END_SIGNALS}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def interrupt_at_first_signal(numbers: Sequence[signal.Signals] = (signal.SIGINT,)) -> None:
    """Raise KeyboardInterrupt at the first of these signals. The next one ends the process."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        end_at_next_signal()
        raise KeyboardInterrupt

    if is_main_thread():
        for number in numbers:
            signal.signal(number, interrupt)
