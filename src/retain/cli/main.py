"""The command line: call what was parsed (options.py), print. Bad input gives one line on stderr and exit code 2."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from retain.cli.args import build_parser

if TYPE_CHECKING:
    from retain.llm import LLM
    from retain.outputs import RequestOutput
    from retain.sampling_params import SamplingParams

ENGINE_ARGS = (
    *("dtype", "weights", "kv_policy", "speculate", "prefix", "tier", "kv_memory", "page_size", "max_batched_tokens"),
    "context",
    "max_running_requests",
    "backend",
    "device",
)
LIMIT_ARGS = ("queue", "per_key", "tokens", "choices", "body", "upload_s", "answer_s", "pin_s")
SAMPLING_ARGS = (
    *("max_tokens", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty"),
    *("frequency_penalty", "seed", "stop", "ignore_eos", "logprobs"),
)


def main(argv: Sequence[str] | None = None) -> int:
    """The `retain` command."""
    args = build_parser().parse_args(argv)
    # Threads that share a core wait for each other's time slice at every product: 100 times slower (docs/log.md).
    os.environ.setdefault("OMP_PROC_BIND", "true")
    try:
        return {"run": run, "chat": chat, "serve": serve, "bench": bench, "cache": cache}[args.command](args)
    except (ValueError, OSError, MemoryError) as error:
        print(f"retain: {' '.join(str(error).split()) or type(error).__name__}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def given_args(args: argparse.Namespace, names: Sequence[str]) -> dict[str, Any]:
    """Those of these options that were given."""
    return {n: getattr(args, n) for n in names if hasattr(args, n)}


def load_llm(args: argparse.Namespace) -> tuple[LLM, SamplingParams]:
    """The engine and the parameters that a command asks for. Parameters are checked before the model is loaded."""
    from retain.sampling_params import SamplingParams

    if not hasattr(args, "model"):
        raise ValueError("which model? --model takes smollm2, gemma3, a .gguf file, a Hugging Face folder, or a hub id")
    params = SamplingParams(**given_args(args, SAMPLING_ARGS))
    from retain.llm import LLM

    return LLM(args.model, progress=True, **given_args(args, ENGINE_ARGS)), params


def run(args: argparse.Namespace) -> int:
    """`retain run`: stream one answer, or print it as JSON."""
    prompt = read_prompt(args)
    llm, params = load_llm(args)
    ids = llm.tokenizer.encode_chat([{"role": "user", "content": prompt}]) if args.chat else llm.encode(prompt)
    params = apply_default_max_tokens(llm, params, len(ids))
    if args.json:
        (answer,) = llm.generate([ids], params)
        print(json.dumps(to_json(llm, answer), ensure_ascii=False))
    else:
        print_stats(stream_to_stdout(llm, ids, params))
    llm.close()
    return 0


def chat(args: argparse.Namespace) -> int:
    """`retain chat`: read a line, stream the answer, remember both. An empty line or Ctrl-D ends it."""
    if args.url:
        return chat_with_server(args)
    llm, params = load_llm(args)

    def answer(messages: list[dict[str, str]]) -> str:
        ids = llm.tokenizer.encode_chat(messages)
        answer = stream_to_stdout(llm, ids, apply_default_max_tokens(llm, params, len(ids)))
        print_stats(answer)
        return answer.text

    chat_loop(args.system, answer)
    llm.close()
    return 0


def chat_with_server(args: argparse.Namespace) -> int:
    """The same with a server."""
    from retain.cli.http_client import Client

    asked = (*SAMPLING_ARGS, "kv_policy", "speculate")
    if wrong := [name for name in ENGINE_ARGS if hasattr(args, name) and name not in asked]:
        raise ValueError(f"--{wrong[0].replace('_', '-')} is the server's to choose, not for --url")
    client, options = Client(args.url, getattr(args, "model", None)), given_args(args, asked)

    def answer(messages: list[dict[str, str]]) -> str:
        pieces = []
        for piece in client.stream(messages, options):
            print(piece, end="", flush=True)
            pieces.append(piece)
        print(flush=True)
        return "".join(pieces)

    chat_loop(args.system, answer)
    return 0


def chat_loop(system: str | None, generate_reply: Callable[[list[dict[str, str]]], str]) -> None:
    """Line by line, until an empty one or the end."""
    messages = [{"role": "system", "content": system}] if system else []
    while True:
        try:
            line = input("> " if sys.stdin.isatty() else "")
        except EOFError:
            line = ""
        if not line.strip():
            return
        messages.append({"role": "user", "content": line})
        messages.append({"role": "assistant", "content": generate_reply(messages)})


def serve(args: argparse.Namespace) -> int:
    """`retain serve`."""
    try:
        import uvicorn  # noqa: F401
    except ImportError:
        raise ValueError("serving needs more packages: pip install 'retain[serve]'") from None
    from retain.server import auth
    from retain.server.config import Limits, ServerConfig
    from retain.server.launch import serve

    if not hasattr(args, "model"):
        raise ValueError("which model? give --model")
    place = ServerConfig(
        host=args.host,
        port=args.port,
        served_model_name=args.name or Path(args.model).stem,
        api_keys=auth.load_api_keys(Path(args.api_keys) if args.api_keys else None, os.environ),
        limits=Limits(**given_args(args, LIMIT_ARGS)),
        allowed_origins=tuple(args.cors or ()),
        allowed_drafters=tuple(dict.fromkeys([*(args.drafter or []), "ngram", "self"])),
        enable_inspector=args.inspect,
        metrics_prefix=args.metrics_prefix,
        drain_timeout=args.drain_s,
    )
    serve(lambda: load_llm(args)[0], place)
    return 0


def bench(args: argparse.Namespace) -> int:
    """`retain bench ...`."""
    from retain.bench import commands

    return commands.run_bench(args, lambda: load_llm(args)[0])


def cache(args: argparse.Namespace) -> int:
    """`retain cache ...`."""
    from retain.cli import cache

    if args.does == "ls":
        return cache.ls(Path(args.path), args.json)
    return cache.verify(Path(args.path)) if args.does == "verify" else cache.clear(Path(args.path))


def read_prompt(args: argparse.Namespace) -> str:
    """The prompt, from the argument, a file or standard input. Raises ValueError or OSError."""
    if (args.prompt is None) == (args.file is None):
        raise ValueError("give a prompt, or -f FILE (one of them)")
    if args.prompt not in (None, "-"):
        return str(args.prompt)
    name = args.file or "-"
    try:
        data = sys.stdin.buffer.read() if name == "-" else Path(name).read_bytes()
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{name} is not UTF-8 text: byte {error.start} is not") from None


def apply_default_max_tokens(llm: LLM, params: SamplingParams, num_prompt_tokens: int) -> SamplingParams:
    """Where nobody said how long the answer may be: 512 tokens, or what the context leaves."""
    from dataclasses import replace

    if params.max_tokens is not None:
        return params
    return replace(params, max_tokens=max(1, min(512, llm.max_output_tokens(num_prompt_tokens))))


def stream_to_stdout(llm: LLM, ids: list[int], params: SamplingParams) -> RequestOutput:
    """Print an answer as it comes."""
    for piece in llm.stream(ids, params):
        print(piece.text, end="", flush=True)
        if piece.output:
            print(flush=True)
            return piece.output
    raise AssertionError("a stream ends with an answer")


def print_stats(output: RequestOutput) -> None:
    """What it cost, for people: on stderr."""
    kv = output.kv
    print(
        f"[{len(output.token_ids)} tokens, {output.decode_tok_s:.1f} tokens/s, first after {output.ttft_s:.2f} s; "
        f"KV {kv['bytes_peak'] / 2**20:.1f} MiB, full would be {kv['bytes_if_full'] / 2**20:.1f}]",
        file=sys.stderr,
    )


def to_json(llm: LLM, output: RequestOutput) -> dict[str, Any]:
    """The object of `retain run --json`."""
    out: dict[str, Any] = {
        "text": output.text,
        "token_ids": output.token_ids,
        "finish_reason": output.finish_reason,
        "usage": {
            "prompt_tokens": output.prompt_tokens,
            "prompt_tokens_details": {"cached_tokens": output.cached_tokens},
            "completion_tokens": len(output.token_ids),
            "total_tokens": output.prompt_tokens + len(output.token_ids),
        },
        "timings": {
            "load_s": round(llm.load_s, 4),
            "ttft_s": round(output.ttft_s, 4),
            "decode_tok_s": round(output.decode_tok_s, 2),
        },
        "kv": output.kv,
    }
    if output.speculate:
        out["speculate"] = output.speculate
    if output.logprobs:
        out["logprobs"] = [{"token": p.token_id, "logprob": p.logprob, "top": p.top_logprobs} for p in output.logprobs]
    return out


if __name__ == "__main__":
    sys.exit(main())
