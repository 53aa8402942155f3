"""Every command and option of the command line. What is not known here: what they do."""

from __future__ import annotations

import argparse
from functools import partial
from typing import NoReturn

from retain.plugins import parse_size


class CommandParser(argparse.ArgumentParser):
    """Says what is wrong in one line."""

    def error(self, message: str) -> NoReturn:
        """Exit code 2."""
        self.exit(2, f"{self.prog}: {message}\n")


def build_parser() -> CommandParser:
    """Every command and option. An option that is not given is absent, so that defaults live in one place."""
    top = CommandParser(
        prog="retain", description="An LLM inference engine whose subject is the KV cache.", allow_abbrev=False
    )
    commands = top.add_subparsers(dest="command", required=True, metavar="run | chat | serve | bench | cache")
    shared = CommandParser(add_help=False, argument_default=argparse.SUPPRESS, allow_abbrev=False)
    shared.add_argument(
        "--model", help="smollm2, gemma3, a .gguf file, a Hugging Face folder, a hub id, or random:SHAPE"
    )
    shared.add_argument("--device", help="auto (default: a GPU where there is one), cpu or cuda")
    shared.add_argument("--dtype", help="bfloat16 (default), float32, or float16 on a GPU")
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
        help="hard cap of the KV pool, such as 512MiB (default: 4GiB, or most of what a GPU has free)",
    )
    shared.add_argument("--page-size", type=int, metavar="N", help="slots of a page (default 64)")
    shared.add_argument("--step-tokens", type=int, metavar="N", help="fresh tokens of a step at most (default 512)")
    shared.add_argument(
        "--context", type=int, metavar="N", help="plan for texts of at most N tokens (default: the model's)"
    )
    shared.add_argument("--backend", help="kernels: auto (default), cpu, triton or reference")
    drawing = CommandParser(add_help=False, argument_default=argparse.SUPPRESS, allow_abbrev=False)
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
    chat.add_argument("--url", help="talk to a server, such as http://127.0.0.1:8000/v1 (key: $OPENAI_API_KEY)")
    bench = commands.add_parser("bench", help="measure", allow_abbrev=False)
    kinds = bench.add_subparsers(
        dest="bench", required=True, metavar="speed | budget | quality | speculate | prefix | serve"
    )
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
    load = kinds.add_parser("serve", help="load on a server, and what its users feel", allow_abbrev=False)
    load.add_argument("--url", default="http://127.0.0.1:8000/v1", help="(key: $OPENAI_API_KEY)")
    load.add_argument("--model", required=True, help="what the server calls it")
    load.add_argument("--items", type=int, metavar="N", default=100, help="requests (default 100)")
    load.add_argument("--rate", type=float, metavar="R", help="a second, Poisson (default: all at once)")
    load.add_argument("--streams", type=int, metavar="N", help="at once, at most: throughput, not waiting times")
    load.add_argument("--prompt", type=int, metavar="N", default=128, help="words of a prompt (default 128)")
    load.add_argument("--new", type=int, metavar="N", default=64, help="tokens of an answer (default 64)")
    load.add_argument("--seed", type=int, metavar="N", default=0, help="of prompts and waiting times")
    load.add_argument("--trace", metavar="FILE", help="JSON lines of timestamp (ms), lengths and hash_ids (Mooncake's)")
    load.add_argument("--faster", type=float, metavar="X", default=1.0, help="than the trace was")
    load.add_argument("--shorter", type=float, metavar="X", default=1.0, help="than the trace's texts")
    load.add_argument("--ttft", type=float, metavar="MS", default=1000.0, help="of a good answer (default 1000)")
    load.add_argument("--each", type=float, metavar="MS", default=100.0, help="a token of it (default 100)")
    load.add_argument("--out", metavar="DIR", help="write it as JSON")
    load.add_argument("--json", action="store_true", help="one JSON line")
    served = commands.add_parser("serve", parents=[shared], help="answer over HTTP", allow_abbrev=False)
    served.add_argument("--host", default="127.0.0.1", help="address to listen at (default 127.0.0.1: this machine)")
    served.add_argument("--port", type=int, default=8000, metavar="N", help="default 8000; 0 is any")
    served.add_argument("--name", help="what clients call the model (default: as --model, without its folder)")
    served.add_argument("--api-keys", metavar="FILE", help="who may ask: lines of `name key` (also $RETAIN_API_KEYS)")
    served.add_argument("--cors", action="append", metavar="ORIGIN", help="web pages that may ask (may be repeated)")
    served.add_argument("--drafter", action="append", metavar="S", help="requests may ask for it too (may be repeated)")
    limit = partial(served.add_argument, default=argparse.SUPPRESS)
    limit("--max-requests", type=int, metavar="N", help="answers at once (default 64)")
    limit("--queue", type=int, metavar="N", help="answers that wait besides (default 256)")
    limit("--per-key", type=int, metavar="N", help="answers of one key at once (default: as many as there are)")
    limit("--tokens", type=int, metavar="N", help="of an answer at most (default: to the end of the context)")
    limit("--choices", type=int, metavar="N", help="answers of one call, prompts times n (default 16)")
    limit("--body", type=_size_arg, metavar="SIZE", help="of a call (default 8MiB)")
    limit("--upload-s", type=float, metavar="S", help="for a call to come (default 30)")
    limit("--answer-s", type=float, metavar="S", help="for an answer, from its call to its end (default 600)")
    limit("--pin-s", type=float, metavar="S", help="a prompt may be pinned for (default 3600)")
    served.add_argument("--inspect", action="store_true", help="a page at /inspect that shows what is kept")
    served.add_argument("--metrics-prefix", default="retain_", metavar="P", help="vllm: is for dashboards of vLLM's")
    served.add_argument("--drain-s", type=int, default=300, metavar="S", help="for what runs, once told to end")
    cache = commands.add_parser("cache", help="look after a store of --tier disk", allow_abbrev=False)
    cache.add_argument("does", choices=("ls", "verify", "clear"), metavar="ls | verify | clear")
    cache.add_argument("path", metavar="DIR", help="the store")
    cache.add_argument("--json", action="store_true", help="ls: a JSON line for each span")
    return top


def _size_arg(text: str) -> int:
    try:
        return parse_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
