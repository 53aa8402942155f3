"""Shell commands of the user that flush, restart or reload the server under test."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable

from cachecheck.config import CachecheckConfig

POLL_S = 0.2


def run_in_shell(command: str, timeout: float) -> None:
    """Run a command of the user. Raises ValueError where it fails or takes too long."""
    try:
        null = subprocess.DEVNULL
        code = subprocess.run(command, shell=True, timeout=timeout, stdin=null, stdout=null).returncode
    except subprocess.TimeoutExpired:
        raise ValueError(f"{command!r} took longer than --timeout {timeout:g}") from None
    if code:
        raise ValueError(f"{command!r} failed with exit code {code}")


class Commands:
    """Runs commands, and waits until the server answers again. `run` runs one; `answers` asks whether it does."""

    def __init__(self, config: CachecheckConfig, answers: Callable[[], object], run: Callable[[str, float], None]):
        self._config = config
        self._answers = answers
        self._run = run

    def flush(self) -> None:
        """Run the command that empties the server's cache."""
        self._run_and_wait(self._config.flush_command)

    def reset(self) -> None:
        """Run the command that empties all levels of the server's cache."""
        self._run_and_wait(self._config.reset_command)

    def restart(self) -> None:
        """Run the command that restarts the server, and wait until it answers."""
        self._run_and_wait(self._config.restart_command)

    def reload(self) -> None:
        """Run the command that loads other weights, and wait until the server answers."""
        self._run_and_wait(self._config.reload_command)

    def _run_and_wait(self, command: str | None) -> None:
        """Run a command. Raises ValueError where the server does not answer in time afterwards."""
        if command is None:
            raise ValueError("no command was given")
        self._run(command, self._config.timeout)
        end = time.monotonic() + self._config.timeout
        while True:
            try:
                self._answers()
                return
            except ValueError:
                if time.monotonic() > end:
                    raise
                time.sleep(POLL_S)
