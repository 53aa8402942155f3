"""The process behind a sandbox: renders chat templates and compiles grammars under limits that may end it.

Reads requests from stdin, each a JSON text, and writes replies to stdout, each a kind and a text. Requests and replies
come after their length in four bytes. The first reply, of kind READY, says that the process has started. It imports
neither torch nor the engine, so that a new process is ready in a fraction of a second.

What a request does to the process shows in how that ends, so that nothing else is taken for it: see `Sandbox`.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import IO, TYPE_CHECKING, Any

from retain.files import shorten
from retain.processing.chat_template import ChatTemplate
from retain.processing.lark import name_special_token

if TYPE_CHECKING:  # an optional dependency
    from llguidance import LLTokenizer

# Far less than the server's threads have: a grammar that compiles here never overflows a stack there.
STACK_BYTES = 2**20
EXIT_OUT_OF_MEMORY = 65
READY = b"S"  # the kinds of replies
RESULT = b"R"
ERROR = b"E"  # the input's
FAILURE = b"F"  # ours
MAX_ERROR_LENGTH = 1000
ENCODING_ERRORS = "surrogatepass"  # templates may write half of a surrogate pair


def read_frame(file: IO[bytes]) -> bytes | None:
    """Read a frame; None at the end of the file."""
    header = file.read(4)
    return file.read(int.from_bytes(header, "big")) if len(header) == 4 else None


def write_reply(file: IO[bytes], kind: bytes, text: str = "") -> None:
    """Write a reply to the server: its length, its kind of one byte, and its text."""
    data = text.encode(errors=ENCODING_ERRORS)
    file.write((len(kind) + len(data)).to_bytes(4, "big") + kind)
    file.write(data)
    file.flush()


@cache
def compile_template(source: str, special_tokens: tuple[tuple[str, str], ...]) -> ChatTemplate:
    """Compile a chat template once. Raises ValueError."""
    return ChatTemplate(source, dict(special_tokens))


def render_chat(source: str, special_tokens: Mapping[str, str], max_characters: int, **arguments: Any) -> str:
    """Render a chat template. Raises ValueError, also where it writes more than it may."""
    text = compile_template(source, tuple(special_tokens.items())).render(**arguments)
    if len(text) > max_characters:
        raise ValueError(f"the chat template writes more than {max_characters} characters: shorten the conversation")
    return text


def check_grammar(grammar: str, special_tokens: Sequence[str] = ()) -> str:
    """Compile a grammar over bytes: what is slow or large about it does not depend on the vocabulary.

    `special_tokens`: those that the grammar may name. A grammar with an error passes, because the server reports it
    better. Returns no text.
    """
    from llguidance import LLMatcher

    LLMatcher(create_byte_tokenizer(tuple(special_tokens)), grammar, log_level=0)
    return ""


@cache
def create_byte_tokenizer(special_tokens: tuple[str, ...]) -> LLTokenizer:
    """Return a tokenizer of bytes and of some special tokens."""
    from llguidance import LLTokenizer, TokenizerWrapper

    if not special_tokens:
        return LLTokenizer("byte")
    return LLTokenizer(TokenizerWrapper(_ByteTokenizer(special_tokens)))


class _ByteTokenizer:
    """What llguidance needs to know of a tokenizer: here of bytes, an end and special tokens."""

    bos_token_id = None
    eos_token_id = 256

    def __init__(self, special_tokens: Sequence[str]):
        names = (name_special_token(text).encode() for text in special_tokens)
        self.tokens = [*(bytes([i]) for i in range(256)), b"<|end of the text|>", *names]
        self.special_token_ids = list(range(256, len(self.tokens)))

    def __call__(self, text: bytes) -> list[int]:
        return list(text)


OPERATIONS: Mapping[str, Callable[..., str]] = {"render_chat": render_chat, "check_grammar": check_grammar}


def serve(requests: IO[bytes], replies: IO[bytes], timeout_s: float) -> None:
    """Answer requests until the parent closes the pipe. One that takes too much memory or time ends the process."""
    write_reply(replies, READY)
    try:
        while (frame := read_frame(requests)) is not None:
            signal.setitimer(signal.ITIMER_PROF, timeout_s)  # of the processor: a busy machine is nobody's fault
            kind, text = answer(frame)
            signal.setitimer(signal.ITIMER_PROF, 0)
            write_reply(replies, kind, text)
    except MemoryError:
        os._exit(EXIT_OUT_OF_MEMORY)


def answer(frame: bytes) -> tuple[bytes, str]:
    """Return kind and text of the reply to a request. Raises MemoryError."""
    try:
        operation, arguments = json.loads(frame)
        return RESULT, OPERATIONS[operation](**arguments)
    except MemoryError:
        raise
    except RecursionError:
        return ERROR, "the request is nested too deeply"
    except ValueError as error:
        return ERROR, shorten(error, MAX_ERROR_LENGTH)
    except BaseException as error:  # also a panic of a library in Rust
        return FAILURE, shorten(f"{type(error).__name__}: {error}", MAX_ERROR_LENGTH)


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
    requests = os.fdopen(os.dup(0), "rb")
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    threading.stack_size(STACK_BYTES)
    thread = threading.Thread(target=serve, args=(requests, replies, timeout_s))
    limit_memory(memory_bytes)
    thread.start()
    thread.join()


if __name__ == "__main__":
    main(float(sys.argv[1]), int(sys.argv[2]))
