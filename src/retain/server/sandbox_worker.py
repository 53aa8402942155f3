"""The process behind a sandbox: renders chat templates and compiles grammars under limits that may end it.

Reads requests from stdin and writes replies to stdout, each a JSON text after its length in four bytes. It imports
neither torch nor the engine, so that a new process is ready in a fraction of a second.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from functools import cache
from typing import IO, Any

from retain.processing.chat_template import ChatTemplate

# Far less than the server's threads have: a grammar that compiles here never overflows a stack there.
STACK_BYTES = 2**20


def read_frame(file: IO[bytes]) -> bytes | None:
    """Read a frame; None at the end of the file."""
    header = file.read(4)
    return file.read(int.from_bytes(header, "big")) if len(header) == 4 else None


def write_frame(file: IO[bytes], data: bytes) -> None:
    """Write a frame."""
    file.write(len(data).to_bytes(4, "big") + data)
    file.flush()


@cache
def compile_template(source: str, special_tokens: tuple[tuple[str, str], ...]) -> ChatTemplate:
    """Compile a chat template once. Raises ValueError."""
    return ChatTemplate(source, dict(special_tokens))


def render_chat(source: str, special_tokens: Mapping[str, str], **arguments: Any) -> str:
    """Render a chat template. Raises ValueError."""
    return compile_template(source, tuple(special_tokens.items())).render(**arguments)


def check_grammar(grammar: str) -> None:
    """Compile a grammar over bytes: what is slow or large about it does not depend on the vocabulary.

    A grammar with an error passes, because the server reports it better.
    """
    from llguidance import LLMatcher, LLTokenizer

    LLMatcher(LLTokenizer("byte"), grammar, log_level=0)


OPERATIONS: Mapping[str, Callable[..., Any]] = {"render_chat": render_chat, "check_grammar": check_grammar}


def serve(requests: IO[bytes], replies: IO[bytes], timeout_s: float) -> None:
    """Answer requests until the parent closes the pipe. A request that takes too long ends the process."""
    while (frame := read_frame(requests)) is not None:
        signal.setitimer(signal.ITIMER_REAL, timeout_s)
        try:
            operation, arguments = json.loads(frame)
            reply = {"result": OPERATIONS[operation](**arguments)}
        except MemoryError:
            os._exit(1)
        except Exception as error:
            reply = {"error": str(error)}
        signal.setitimer(signal.ITIMER_REAL, 0)
        write_frame(replies, json.dumps(reply).encode())


def limit_memory(num_bytes: int) -> None:
    """Allow the process `num_bytes` of memory beyond what it has, where the system tells how much that is."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            present = int(file.read().split()[0]) * resource.getpagesize()
    except OSError:
        return
    resource.setrlimit(resource.RLIMIT_AS, (present + num_bytes, present + num_bytes))


def main(timeout_s: float, memory_bytes: int) -> None:
    """Serve on stdin and stdout. What libraries print goes to stderr."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the server, which drains first
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    threading.stack_size(STACK_BYTES)
    thread = threading.Thread(target=serve, args=(requests, replies, timeout_s))
    limit_memory(memory_bytes)
    thread.start()
    thread.join()


if __name__ == "__main__":
    main(float(sys.argv[1]), int(sys.argv[2]))
