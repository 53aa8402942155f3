"""`retain chat`: a conversation in the terminal, with an engine of its own or with a server (`--url`)."""

from __future__ import annotations

import os
import signal
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from types import FrameType
from typing import Any

from retain.cli.args import from_args, given_args
from retain.config import Config
from retain.plugins import needs_extra
from retain.sampling_params import SamplingParams
from retain.signals import interrupt_at_first_signal, restored_handlers
from retain.terminal import escape_controls

SERVER_OPTIONS = ("model", "kv_policy", "speculate")  # of the engine's options, those that a request may choose
CONNECT_TIMEOUT_S = 30.0
HELP = """\
/clear  forget the conversation, but not the system message
/quit   end; an empty line and Ctrl-D do too
Ctrl-C  stop the answer; at the prompt, end"""
Message = dict[str, str]


def chat(args: Namespace) -> int:
    """Read a line, stream the answer, keep both in the conversation. /help lists the commands."""
    return chat_with_server(args) if args.url else chat_with_engine(args)


def chat_with_engine(args: Namespace) -> int:
    """Answer with an engine in this process. Arguments are checked before the model is loaded."""
    config = from_args(Config, args)
    params = from_args(SamplingParams, args)
    from retain.cli import loading
    from retain.cli.answers import prepare_chat
    from retain.cli.run import limit_max_tokens, print_stats, stream_to_stdout

    with closing(loading.load_llm(config)) as llm:

        def generate_reply(messages: list[Message]) -> str:
            prompt = prepare_chat(llm.tokenizer, messages)
            num_system = llm.tokenizer.count_system_tokens(messages)
            limited = limit_max_tokens(llm, params, len(prompt.token_ids), num_system)
            with deferred_interrupts() as check_interrupt:
                output = stream_to_stdout(llm, prompt, limited, check_interrupt, num_system)
            print_stats(output)
            return output.text

        chat_loop(args.system, generate_reply)
    return 0


def chat_with_server(args: Namespace) -> int:
    """Answer with the server at `--url`."""
    given = given_args(args, Config)
    if wrong := [name for name in given if name not in SERVER_OPTIONS]:
        raise ValueError(f"--{wrong[0].replace('_', '-')} is an option of the server, not of --url")
    with needs_extra("--url", "client"):
        import httpx

        from retain.http_client import HttpClient

    timeout = httpx.Timeout(None, connect=CONNECT_TIMEOUT_S)  # an answer may take as long as it takes
    with closing(HttpClient(args.url, os.environ.get("OPENAI_API_KEY"), timeout)) as client:
        model = given.pop("model", None) or client.first_model()
        options = {"model": model, "stream": True, **given_args(args, SamplingParams), **given}

        def generate_reply(messages: list[Message]) -> str:
            pieces = []
            for event in client.stream("/chat/completions", {**options, "messages": messages}):
                pieces.append(content_of(event))
                print(pieces[-1], end="", flush=True)
            print(flush=True)
            return "".join(pieces)

        chat_loop(args.system, generate_reply)
    return 0


def content_of(event: Mapping[str, Any]) -> str:
    """Return the content in an event of a streamed chat. Raises ValueError."""
    try:
        return "".join(choice["delta"].get("content") or "" for choice in event.get("choices") or ())
    except (LookupError, TypeError, AttributeError):
        raise ValueError("the answer is not one of OpenAI's API") from None


def chat_loop(system: str | None, generate_reply: Callable[[list[Message]], str]) -> None:
    """Answer line by line, until an empty line, /quit or the end of standard input.

    On a terminal an error or Ctrl-C ends the answer, not the conversation, which is then as it was before the line.
    """
    conversation: list[Message] = [{"role": "system", "content": system}] if system else []
    num_system = len(conversation)
    interactive = sys.stdin.isatty()
    while True:
        try:
            line = input("> " if interactive else "")
        except EOFError:
            return
        command = line.strip()
        if command in ("", "/quit"):
            return
        if command == "/help":
            print(HELP, file=sys.stderr)
        elif command == "/clear":
            del conversation[num_system:]
        else:
            question: Message = {"role": "user", "content": line}
            try:
                with restored_handlers():  # each answer may be stopped once
                    interrupt_at_first_signal()
                    reply = generate_reply([*conversation, question])
            except (ValueError, KeyboardInterrupt) as error:
                if not interactive:
                    raise
                reason = escape_controls(str(error)) or "interrupted"
                print(f"\n[{reason}; the line is not in the conversation]", file=sys.stderr)
                continue
            conversation += [question, {"role": "assistant", "content": reply}]


@contextmanager
def deferred_interrupts() -> Iterator[Callable[[], None]]:
    """Keep Ctrl-C from interrupting a step of the engine. Yields a function that raises KeyboardInterrupt after one.

    A second Ctrl-C raises at once.
    """
    interrupted = False

    def handle(signum: int, frame: FrameType | None) -> None:
        nonlocal interrupted
        if interrupted:
            raise KeyboardInterrupt
        interrupted = True

    def check() -> None:
        if interrupted:
            raise KeyboardInterrupt

    previous = signal.signal(signal.SIGINT, handle)
    try:
        yield check
    finally:
        signal.signal(signal.SIGINT, previous)
