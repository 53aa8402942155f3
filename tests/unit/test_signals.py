"""Ctrl-C twice: the first ends a command with a code, the second ends the process, and neither prints a traceback."""

import signal
import subprocess
import sys

import pytest

# A command that is interrupted, and once more: while it cleans up, in a finalizer, when Python exits.
COMMAND = """
import atexit, signal, sys, types, weakref
from retain.cli.main import main

interrupt = lambda: signal.raise_signal(signal.SIGINT)

class Resource:
    pass

def run(args):
    resource = Resource()
    {before}
    try:
        interrupt()
    finally:
        {after}

sys.modules["retain.cli.run"] = types.SimpleNamespace(run=run)
sys.argv = ["retain", "run", "x", "--model", "m"]
sys.exit(main())
"""


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("pass", "interrupt()"),
        ("weakref.finalize(resource, interrupt)", "del resource"),
        ("atexit.register(interrupt)", "pass"),
    ],
)
def test_a_second_interrupt_ends_a_command_without_a_traceback(before, after):
    done = subprocess.run(
        [sys.executable, "-c", COMMAND.format(before=before, after=after)], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (-signal.SIGINT, "")


def test_a_single_interrupt_ends_a_command_with_its_code():
    done = subprocess.run(
        [sys.executable, "-c", COMMAND.format(before="pass", after="pass")], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (130, "")
