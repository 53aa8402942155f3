"""A pytest plugin that says at once why a test failed: a run that is cut at its limit has no summary."""

from __future__ import annotations

import pytest


class Failures:
    """Prints a line like those of the summary for each test that fails."""

    def __init__(self, config: pytest.Config):
        self.config = config

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Print the line of a test that failed."""
        if report.failed:
            crash = getattr(report.longrepr, "reprcrash", None)
            message = str(crash.message if crash else report.longrepr).strip().partition("\n")[0]
            terminal = self.config.pluginmanager.get_plugin("terminalreporter")
            terminal.ensure_newline()
            terminal.write_line(f"FAILED {report.nodeid} - {message or 'no message'}")


def pytest_configure(config: pytest.Config) -> None:
    """Print in the process that reports, and not in those that run the tests."""
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Failures(config))
