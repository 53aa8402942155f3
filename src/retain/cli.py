"""The command line: parse, call, print. Bad input gives one line on stderr and exit code 2."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from retain.answer import Answer
    from retain.engine.request import SamplingParams
    from retain.llm import LLM

ENGINE = (
    *("dtype", "weights", "kv_policy", "speculate", "prefix", "tier", "kv_memory", "page_size", "step_tokens"),
    "context",
    "backend",
)
SAMPLING = (
    *("max_tokens", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty"),
    *("frequency_penalty", "seed", "stop", "ignore_eos", "logprobs"),
)


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line."""

    def error(self, message: str) -> NoReturn:
        """Exit code 2."""
        self.exit(2, f"{self.prog}: {message}\n")


def parser() -> Parser:
    """Every command and option. An option that is not given is absent, so that defaults live in one place."""
    top = Parser(
        prog="retain", description="An LLM inference engine whose subject is the KV cache.", allow_abbrev=False
    )
    commands = top.add_subparsers(dest="command", required=True, metavar="run | chat | bench | cache")
    shared = Parser(add_help=False, argument_default=argparse.SUPPRESS, allow_abbrev=False)
    shared.add_argument(
        "--model", required=True, help="smollm2, gemma3, a .gguf file, a Hugging Face folder, or a hub id"
    )
    shared.add_argument("--dtype", help="bfloat16 (default) or float32")
    shared.add_argument("--weights", metavar="W", help="auto (default: as the file has them), bf16, int8 or int4")
    shared.add_argument(
        "--kv-policy",
        metavar="P",
        help="full (default), ring:window=N, or a budget such as keyformer:budget=25%% (docs/policies.md)",
    )
    shared.add_argument(
        "--speculate",
        metavar="S",
        help="draft tokens and verify them: ngram, draft:weights=int4, draft:model=M, self (docs/speculation.md)",
    )
    shared.add_argument(
        "--prefix",
        metavar="P",
        help="what others find: exact (default), exact:keep=prompt, important:ratio=0.25, or off (docs/prefix.md)",
    )
    shared.add_argument(
        "--tier",
        action="append",
        metavar="T",
        help="where pages sleep: ram:capacity=4GiB, disk:path=DIR,capacity=50GiB (may be repeated; docs/prefix.md)",
    )
    shared.add_argument(
        "--kv-memory",
        metavar="SIZE",
        help="hard cap of the KV pool, such as 512MiB (default: 4GiB, where there is as much)",
    )
    shared.add_argument("--page-size", type=int, metavar="N", help="slots of a page (default 64)")
    shared.add_argument("--step-tokens", type=int, metavar="N", help="fresh tokens of a step at most (default 512)")
    shared.add_argument(
        "--context", type=int, metavar="N", help="plan for texts of at most N tokens (default: the model's)"
    )
    shared.add_argument("--backend", help="kernels: auto (default), cpu or reference")
    drawing = Parser(add_help=False, argument_default=argparse.SUPPRESS, allow_abbrev=False)
    drawing.add_argument("--max-tokens", type=int, metavar="N", help="new tokens at most (default 512, or what fits)")
    drawing.add_argument("--temperature", type=float, metavar="T", help="0 is greedy (default 1)")
    drawing.add_argument("--top-k", type=int, metavar="N")
    drawing.add_argument("--top-p", type=float, metavar="P")
    drawing.add_argument("--min-p", type=float, metavar="P")
    drawing.add_argument("--repetition-penalty", type=float, metavar="X")
    drawing.add_argument("--presence-penalty", type=float, metavar="X")
    drawing.add_argument("--frequency-penalty", type=float, metavar="X")
    drawing.add_argument("--seed", type=int, metavar="N")
    drawing.add_argument("--stop", action="append", metavar="TEXT", help="end before this text (may be repeated)")
    drawing.add_argument("--ignore-eos", action="store_true", help="go on after the end of text")
    run = commands.add_parser("run", parents=[shared, drawing], help="answer one prompt", allow_abbrev=False)
    run.add_argument("prompt", nargs="?", help="raw text; - is standard input")
    run.add_argument("-f", "--file", help="read the prompt from a file")
    run.add_argument("--chat", action="store_true", help="wrap the prompt in the model's chat template")
    run.add_argument(
        "--logprobs", type=int, metavar="N", default=argparse.SUPPRESS, help="with --json: N likeliest too"
    )
    run.add_argument("--json", action="store_true", help="one JSON object on standard output")
    chat = commands.add_parser("chat", parents=[shared, drawing], help="talk in the terminal", allow_abbrev=False)
    chat.add_argument("--system", help="a system message")
    bench = commands.add_parser("bench", help="measure", allow_abbrev=False)
    kinds = bench.add_subparsers(dest="bench", required=True, metavar="speed | budget | quality | speculate | prefix")
    speed = kinds.add_parser("speed", parents=[shared], help="prefill and decoding speed", allow_abbrev=False)
    speed.add_argument("--workloads", help="comma-separated names (default: all)")
    speed.add_argument("--json", action="store_true", help="a JSON line for each workload")
    budget = kinds.add_parser("budget", parents=[shared], help="what budgets give and take", allow_abbrev=False)
    budget.add_argument(
        "--parts", default="scoring,decode", help="of scoring, decode, throughput (default: the first two)"
    )
    budget.add_argument("--json", action="store_true", help="a JSON line for each figure")
    quality = kinds.add_parser("quality", parents=[shared], help="what forgetting costs", allow_abbrev=False)
    quality.add_argument("--data", metavar="DIR", default=".", help="folder with the tasks' files")
    quality.add_argument("--tasks", metavar="T", default="fidelity", help="comma-separated, or all (default: fidelity)")
    quality.add_argument(
        "--policies", metavar="P", default="window sinks random h2o keyformer", help="separated by spaces"
    )
    quality.add_argument("--budgets", metavar="B", default="50%,25%", help="of every policy (default: 50%%,25%%)")
    quality.add_argument("--items", type=int, metavar="N", default=20, help="of each task (default 20)")
    quality.add_argument("--longest", type=int, metavar="N", default=900, help="tokens of a prompt (default 900)")
    quality.add_argument("--out", metavar="DIR", help="write every number as JSON, and plots as PNG")
    quality.add_argument("--kept", action="store_true", help="with --out: pictures of the tokens that stay")
    quality.add_argument("--json", action="store_true", help="a JSON line for each policy and metric")
    drafts = kinds.add_parser("speculate", parents=[shared], help="what drafters give", allow_abbrev=False)
    drafts.add_argument("--data", metavar="DIR", default=".", help="folder with the workloads' files")
    drafts.add_argument("--workloads", default="humaneval,summaries", help="comma-separated (default: these two)")
    drafts.add_argument("--drafters", default="ngram draft:weights=int4 self", help="separated by spaces")
    drafts.add_argument("--items", type=int, metavar="N", default=8, help="prompts of each workload (default 8)")
    drafts.add_argument("--batch", type=int, metavar="N", default=1, help="at once (default 1)")
    drafts.add_argument("--new", type=int, metavar="N", default=128, help="tokens of an answer (default 128)")
    drafts.add_argument("--contexts", default="4000", help="tokens of books, comma-separated (default 4000)")
    drafts.add_argument("--out", metavar="DIR", help="write every number as JSON, and plots as PNG")
    drafts.add_argument("--json", action="store_true", help="a JSON line for each workload and drafter")
    shares = kinds.add_parser("prefix", parents=[shared], help="what shared prefixes give", allow_abbrev=False)
    shares.add_argument("--data", metavar="DIR", default=".", help="folder with the workloads' files")
    shares.add_argument("--workloads", default="copa,document,trace", help="of copa, piqa, openbookqa, document, trace")
    shares.add_argument(
        "--methods", default="recompute,memory,ram,ssd,ssd-200,important-200", help="comma-separated (docs/prefix.md)"
    )
    shares.add_argument(
        "--ratio", type=float, metavar="R", default=0.25, help="of tokens, important ones (default 0.25)"
    )
    shares.add_argument("--hot", metavar="SIZE", default="64MiB", help="memory of important-lru, -lfu and -worth")
    shares.add_argument("--accuracy", action="store_true", help="of tasks: choose answers too")
    shares.add_argument("--store", metavar="DIR", help="where to make stores, for a while (default: /tmp)")
    shares.add_argument("--items", type=int, metavar="N", default=20, help="requests of each workload (default 20)")
    shares.add_argument("--shared", type=int, metavar="N", default=4000, help="tokens in common (default 4000)")
    shares.add_argument("--out", metavar="DIR", help="write every number as JSON")
    shares.add_argument("--json", action="store_true", help="a JSON line for each workload and method")
    cache = commands.add_parser("cache", help="look after a store of --tier disk", allow_abbrev=False)
    cache.add_argument("does", choices=("ls", "verify", "clear"), metavar="ls | verify | clear")
    cache.add_argument("path", metavar="DIR", help="the store")
    cache.add_argument("--json", action="store_true", help="ls: a JSON line for each span")
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """The `retain` command."""
    args = parser().parse_args(argv)
    # Threads that share a core wait for each other's time slice at every product: 100 times slower (docs/log.md).
    os.environ.setdefault("OMP_PROC_BIND", "true")
    try:
        return {"run": run, "chat": chat, "bench": bench, "cache": cache}[args.command](args)
    except (ValueError, OSError, MemoryError) as error:
        print(f"retain: {' '.join(str(error).split()) or type(error).__name__}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def chosen(args: argparse.Namespace, names: Sequence[str]) -> dict[str, Any]:
    """Those of these options that were given."""
    return {n: getattr(args, n) for n in names if hasattr(args, n)}


def load(args: argparse.Namespace) -> tuple[LLM, SamplingParams]:
    """The engine and the parameters that a command asks for. Parameters are checked before the model is loaded."""
    from retain.engine.request import SamplingParams

    params = SamplingParams(**chosen(args, SAMPLING))
    from retain.llm import LLM

    return LLM(args.model, progress=True, **chosen(args, ENGINE)), params


def run(args: argparse.Namespace) -> int:
    """`retain run`: stream one answer, or print it as JSON."""
    prompt = read_prompt(args)
    llm, params = load(args)
    ids = llm.tokenizer.encode_chat([{"role": "user", "content": prompt}]) if args.chat else llm.encode(prompt)
    params = fit(llm, params, len(ids))
    if args.json:
        (answer,) = llm.generate([ids], params)
        print(json.dumps(report(llm, answer), ensure_ascii=False))
    else:
        closing_line(show(llm, ids, params))
    llm.close()
    return 0


def chat(args: argparse.Namespace) -> int:
    """`retain chat`: read a line, stream the answer, remember both. An empty line or Ctrl-D ends it."""
    llm, params = load(args)
    messages = [{"role": "system", "content": args.system}] if args.system else []
    while True:
        try:
            line = input("> " if sys.stdin.isatty() else "")
        except EOFError:
            line = ""
        if not line.strip():
            llm.close()
            return 0
        messages.append({"role": "user", "content": line})
        ids = llm.tokenizer.encode_chat(messages)
        answer = show(llm, ids, fit(llm, params, len(ids)))
        messages.append({"role": "assistant", "content": answer.text})
        closing_line(answer)


def bench(args: argparse.Namespace) -> int:
    """`retain bench ...`."""
    from retain.bench import commands

    return commands.bench(args, lambda: load(args)[0])


def cache(args: argparse.Namespace) -> int:
    """`retain cache ...`."""
    from retain import stores

    if args.does == "ls":
        return stores.ls(Path(args.path), args.json)
    return stores.verify(Path(args.path)) if args.does == "verify" else stores.clear(Path(args.path))


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


def fit(llm: LLM, params: SamplingParams, prompt: int) -> SamplingParams:
    """Where nobody said how long the answer may be: 512 tokens, or what the context leaves."""
    from dataclasses import replace

    if params.max_tokens is not None:
        return params
    return replace(params, max_tokens=max(1, min(512, llm.longest_answer(prompt))))


def show(llm: LLM, ids: list[int], params: SamplingParams) -> Answer:
    """Print an answer as it comes."""
    for piece in llm.stream(ids, params):
        print(piece.text, end="", flush=True)
        if piece.answer:
            print(flush=True)
            return piece.answer
    raise AssertionError("a stream ends with an answer")


def closing_line(answer: Answer) -> None:
    """What it cost, for people: on stderr."""
    kv = answer.kv
    print(
        f"[{len(answer.token_ids)} tokens, {answer.decode_tok_s:.1f} tokens/s, first after {answer.ttft_s:.2f} s; "
        f"KV {kv['bytes_peak'] / 2**20:.1f} MiB, full would be {kv['bytes_if_full'] / 2**20:.1f}]",
        file=sys.stderr,
    )


def report(llm: LLM, answer: Answer) -> dict[str, Any]:
    """The object of `retain run --json`."""
    out: dict[str, Any] = {
        "text": answer.text,
        "token_ids": answer.token_ids,
        "finish_reason": answer.why,
        "usage": {
            "prompt_tokens": answer.prompt_tokens,
            "prompt_tokens_details": {"cached_tokens": answer.cached_tokens},
            "completion_tokens": len(answer.token_ids),
            "total_tokens": answer.prompt_tokens + len(answer.token_ids),
        },
        "timings": {
            "load_s": round(llm.load_s, 4),
            "ttft_s": round(answer.ttft_s, 4),
            "decode_tok_s": round(answer.decode_tok_s, 2),
        },
        "kv": answer.kv,
    }
    if answer.speculate:
        out["speculate"] = answer.speculate
    if answer.logprobs:
        out["logprobs"] = [{"token": p.token, "logprob": p.logprob, "top": p.top} for p in answer.logprobs]
    return out


if __name__ == "__main__":
    sys.exit(main())
