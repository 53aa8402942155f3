"""Slow tests that `make test` does not run again while nothing that they depend on has changed.

`pytest --stamps` leaves out the tests of a part whose stamp is that of its files, of the installed packages and of
Python. A part that passes as a whole is stamped in pytest's cache, so a clean clone runs every test.
"""

from __future__ import annotations

import hashlib
import sys
from collections import Counter
from collections.abc import Iterable
from importlib.metadata import distributions
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CACHE_KEY = "retain/stamps"
HTTP = (
    "src/retain/server",
    "src/retain/processing",
    "src/retain/llm.py",
    "src/retain/options.py",
    "tests/server/conftest.py",
)
# By how the names of tests begin: files and folders that they depend on beside their own file.
DEPENDENCIES: dict[str, tuple[str, ...]] = {
    "tests/server/test_contract.py::test_openapi_contract_by_schemathesis": (
        *HTTP, "src/retain/sampling_params.py", "src/retain/outputs.py", "src/retain/config.py", "src/retain/formats",
    ),
    "tests/server/test_replicas.py::": (
        *HTTP, "src/retain/cluster", "src/retain/cli", "src/retain/factory.py", "src/retain/config.py",
        "src/retain/signals.py", "src/retain/engine", "tests/helpers/file_modes.py", "tests/server/test_routers.py",
    ),
    "tests/kernels/test_compiles.py::": (
        "src/retain/kernels", "src/retain/models", "src/retain/engine", "src/retain/kv", "src/retain/llm.py",
        "tools/gpu.py", "tools/gpu_bench", "tests/helpers",
    ),
}  # fmt: skip


def stamp_of(part: str, root: Path = ROOT) -> str:
    """Return the hash of what a part depends on."""
    paths = [root / path for path in (part.partition("::")[0], *DEPENDENCIES[part])]
    files = [file for path in paths for file in ([path] if path.is_file() else sorted(path.rglob("*.*")))]
    kept = [file for file in files if file.is_file() and file.suffix != ".so" and "__pycache__" not in file.parts]
    packages = sorted(f"{found.metadata['Name']} {found.version}" for found in distributions())
    digest = hashlib.sha256(repr((sys.version, packages)).encode())
    for file in kept:
        digest.update(f"{file.relative_to(root)} {hashlib.sha256(file.read_bytes()).hexdigest()}\n".encode())
    return digest.hexdigest()


def part_of(name: str) -> str | None:
    """Return the part that a test belongs to."""
    return next((part for part in DEPENDENCIES if name.startswith(part)), None)


class Stamps:
    """A plugin that leaves out parts with a stamp, and stamps those that pass."""

    def __init__(self, config: pytest.Config):
        self._config = config
        self._known: dict[str, str] = config.cache.get(CACHE_KEY, {}) if config.cache else {}
        self._current = {part: stamp_of(part) for part in DEPENDENCIES}
        self._outcomes = {part: Counter[str]() for part in DEPENDENCIES}

    @property
    def unchanged(self) -> list[str]:
        """The parts that need not run."""
        return [part for part, stamp in self._current.items() if self._known.get(part) == stamp]

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Leave out the parts that need not run."""
        unchanged = self.unchanged
        left_out = [item for item in items if part_of(item.nodeid) in unchanged]
        self._config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if part_of(item.nodeid) not in unchanged]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Count the outcomes of a part."""
        if part := part_of(report.nodeid):
            self._outcomes[part]["failed" if report.failed else report.when + report.outcome] += 1

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        """Stamp the parts that passed."""
        options = self._config.option
        is_whole = exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED) and not options.maxfail
        is_worker = hasattr(self._config, "workerinput")
        if is_worker or not is_whole or options.keyword or options.markexpr or "::" in "".join(self._config.args):
            return
        passed = [part for part, seen in self._outcomes.items() if seen["callpassed"] and not seen["failed"]]
        if self._config.cache:
            self._config.cache.set(CACHE_KEY, self._known | {part: self._current[part] for part in passed})

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Name what was left out."""
        for part in self.unchanged:
            terminalreporter.write_line(f"not run, because nothing it depends on has changed since it passed: {part}")


def missing_dependencies(root: Path = ROOT) -> Iterable[str]:
    """Return the paths that parts name and that do not exist."""
    return [
        p for part, paths in DEPENDENCIES.items() for p in (part.partition("::")[0], *paths) if not (root / p).exists()
    ]
