"""`retain chat`: a conversation in the terminal, with an engine of its own or with a server (`--url`)."""

from __future__ import annotations

import os
import sys
from argparse import Namespace
from collections.abc import Callable
from contextlib import closing

from retain.cli.args import from_args, given_args
from retain.config import Config
from retain.sampling_params import SamplingParams

SERVER_OPTIONS = ("model", "kv_policy", "speculate")  # of the engine's options, those that a request may choose


def chat(args: Namespace) -> int:
    """Read a line, stream the answer, keep both in the conversation. An empty line or Ctrl-D ends it."""
    return chat_with_server(args) if args.url else chat_with_engine(args)


def chat_with_engine(args: Namespace) -> int:
    """Answer with an engine in this process. Arguments are checked before the model is loaded."""
    config, params = from_args(Config, args), from_args(SamplingParams, args)
    from retain.cli import loading
    from retain.cli.run import limit_max_tokens, print_stats, stream_to_stdout

    with closing(loading.load_llm(config)) as llm:

        def generate_reply(messages: list[dict[str, str]]) -> str:
            ids = llm.tokenizer.encode_chat(messages)
            output = stream_to_stdout(llm, ids, limit_max_tokens(llm, params, len(ids)))
            print_stats(output)
            return output.text

        chat_loop(args.system, generate_reply)
    return 0


def chat_with_server(args: Namespace) -> int:
    """Answer with the server at `--url`."""
    given = given_args(args, Config)
    if wrong := [name for name in given if name not in SERVER_OPTIONS]:
        raise ValueError(f"--{wrong[0].replace('_', '-')} is an option of the server, not of --url")
    try:
        from retain.cli.http_client import Client
    except ImportError:
        raise ValueError("--url needs the httpx package: pip install 'retain[client]'") from None

    with closing(Client(args.url, given.pop("model", None), os.environ.get("OPENAI_API_KEY"))) as client:
        options = given_args(args, SamplingParams) | given

        def generate_reply(messages: list[dict[str, str]]) -> str:
            pieces = []
            for piece in client.stream(messages, options):
                print(piece, end="", flush=True)
                pieces.append(piece)
            print(flush=True)
            return "".join(pieces)

        chat_loop(args.system, generate_reply)
    return 0


def chat_loop(system: str | None, generate_reply: Callable[[list[dict[str, str]]], str]) -> None:
    """Answer line by line, until an empty line or the end of standard input."""
    messages = [{"role": "system", "content": system}] if system else []
    while True:
        try:
            line = input("> " if sys.stdin.isatty() else "")
        except EOFError:
            return
        if not line.strip():
            return
        messages.append({"role": "user", "content": line})
        messages.append({"role": "assistant", "content": generate_reply(messages)})
