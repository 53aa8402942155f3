"""The command line, in this process."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import pytest

from retain.cli.main import main as retain_main


class Result(NamedTuple):
    """Exit code, standard output, standard error."""

    code: int
    out: str
    err: str


def run_cli(
    capsys: pytest.CaptureFixture[str], *args: object, main: Callable[[Sequence[str]], int] = retain_main
) -> Result:
    """Run a command of `retain`, or of a tool with a `main` of its own."""
    try:
        code = main([str(a) for a in args])
    except SystemExit as stop:
        assert isinstance(stop.code, int)
        code = stop.code
    return Result(code, *capsys.readouterr())


def assert_one_line_error(result: Result, text: str) -> None:
    """The command failed, with one line on standard error that contains the text, and printed nothing else."""
    assert (result.code, result.out) == (2, ""), result
    assert len(result.err.strip().splitlines()) == 1 and text in result.err and "Traceback" not in result.err, result
