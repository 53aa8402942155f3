"""Entry point of the `retain` command: parses arguments, runs the command, turns errors into one line and a code."""

from __future__ import annotations

import importlib
import logging
import os
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from retain.cli.args import CommandParser, build_parser
from retain.garbage_collection import without_garbage_collection
from retain.signals import end_at_next_signal, interrupt_at_first_signal, restored_handlers
from retain.terminal import EscapingFormatter, escape_controls, escaped_output


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command of `retain`. Returns its exit code."""
    return run_main(build_parser, argv, lambda args: f"retain.cli.{args.command}:{args.command}")


def run_main(
    build_parser: Callable[[], CommandParser], argv: Sequence[str] | None, find_command: Callable[[Namespace], str]
) -> int:
    """Run the function that the arguments ask for, written as `module:name`; its module may import what is heavy.

    Returns its exit code: 2 after an error, 130 after Ctrl-C, 0 when the output pipe is closed. A second Ctrl-C ends
    the process at once.
    """
    try:
        with restored_handlers():
            try:
                interrupt_at_first_signal()
                parser = build_parser()
                args = parser.parse_args(argv)
                return _run_command(parser.prog, args, *find_command(args).split(":"))
            finally:
                sys.stdout.flush()  # a closed pipe fails here, not when the interpreter exits
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        _discard_unwritten_output()
        return 0
    finally:
        if argv is None:  # the process ends now
            end_at_next_signal()


def _run_command(prog: str, args: Namespace, module_name: str, function: str) -> int:
    # Threads that share a core wait for each other's time slice at every product, which is 100 times slower.
    os.environ.setdefault("OMP_PROC_BIND", "true")
    try:
        with _log_to_stderr(args.log_level), escaped_output():
            with without_garbage_collection():  # imports leave none, and a collection would visit all of torch
                module = importlib.import_module(module_name)  # torch is imported here, not before
            code: int = getattr(module, function)(args)
            return code
    except BrokenPipeError:  # an OSError, but not an error of the command
        raise
    except (ValueError, OSError, MemoryError) as error:
        line = " ".join(str(error).split()) or type(error).__name__
        print(f"{prog}: {escape_controls(line)}", file=sys.stderr)
        return 2


def _discard_unwritten_output() -> None:
    """Point streams whose reader is gone at the null device, so that the interpreter can flush them when it exits."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except BrokenPipeError:
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, stream.fileno())
            os.close(null)


@contextmanager
def _log_to_stderr(level: str) -> Iterator[None]:
    """Write the package's log to standard error, from this level on."""
    logger = logging.getLogger("retain")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(EscapingFormatter())
    previous_level = logger.level
    logger.setLevel(level.upper())
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(previous_level)


if __name__ == "__main__":
    sys.exit(main())
