"""`retain run`: answer one prompt, as a stream of text or as one JSON object."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any, TextIO

from retain.cli import loading
from retain.cli.answers import AnswerWriter, ChatPrompt, prepare_chat
from retain.cli.args import from_args
from retain.config import Config
from retain.llm import LLM
from retain.outputs import RequestOutput
from retain.processing.input import GenerateRequest
from retain.sampling_params import SamplingParams

DEFAULT_MAX_TOKENS = 512


def run(args: Namespace) -> int:
    """Answer one prompt. Arguments are checked before the model is loaded."""
    prompt = read_prompt(args)
    config = from_args(Config, args)
    params = from_args(SamplingParams, args)
    with closing(loading.load_llm(config)) as llm:
        messages = [{"role": "user", "content": prompt}]
        chat = prepare_chat(llm.tokenizer, messages) if args.chat else ChatPrompt(llm.encode(prompt))
        params = limit_max_tokens(llm, params, len(chat.token_ids))
        if args.json:
            (output,) = llm.generate_from_requests([make_request(chat, params)])
            print(json.dumps(to_json(llm, output) | split_answer(chat, output.text), ensure_ascii=False))
        else:
            print_stats(stream_to_stdout(llm, chat, params))
    return 0


def read_prompt(args: Namespace) -> str:
    """Return the prompt of the arguments, a file or standard input. Raises ValueError or OSError."""
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


def limit_max_tokens(
    llm: LLM, params: SamplingParams, num_prompt_tokens: int, num_system_tokens: int = 0
) -> SamplingParams:
    """Return the parameters with `max_tokens` set; the default is 512, or fewer if fewer fit."""
    if params.max_tokens is not None:
        return params
    room = llm.max_output_tokens(num_prompt_tokens, num_system_tokens)
    return replace(params, max_tokens=min(DEFAULT_MAX_TOKENS, room))


def split_answer(chat: ChatPrompt, text: str) -> dict[str, str]:
    """Return the content and the reasoning of a whole answer; nothing where all of it is content."""
    if not chat.parser:
        return {}
    parts = chat.parser.feed(text, finished=True)
    return {"text": parts.content, "reasoning": parts.reasoning}


def make_request(chat: ChatPrompt, params: SamplingParams, num_system_tokens: int = 0) -> GenerateRequest:
    """Return the request of a prompt, whose answer shows the tokens that its parser must see."""
    return GenerateRequest(chat.token_ids, params, num_system_tokens=num_system_tokens, shown_tokens=chat.shown_tokens)


def stream_to_stdout(
    llm: LLM,
    chat: ChatPrompt,
    params: SamplingParams,
    check_interrupt: Callable[[], None] = lambda: None,
    num_system_tokens: int = 0,
) -> RequestOutput:
    """Print an answer as it is generated; until then, a terminal shows how far the prompt is computed.

    The text of the output is the content of the answer. `check_interrupt` is called between steps; an error of it
    cancels the request. The first `num_system_tokens` are a system prompt.
    """
    progress = PrefillProgress()
    writer = AnswerWriter(chat.parser)

    def on_prefill(num_computed: int, num_tokens: int) -> None:
        check_interrupt()
        progress.update(num_computed, num_tokens)

    try:
        for chunk in llm.stream_from_request(make_request(chat, params, num_system_tokens), on_prefill):
            check_interrupt()
            progress.erase()
            writer.write(chunk.text, finished=chunk.output is not None)
            if chunk.output:
                return replace(chunk.output, text=writer.content)
    finally:
        progress.erase()
    raise AssertionError("a stream ends with its output")


def print_stats(output: RequestOutput) -> None:
    """Print speed and KV memory on standard error."""
    kv = output.kv
    print(
        f"[{len(output.token_ids)} tokens, {output.decode_tok_s:.1f} tokens/s, first after {output.ttft_s:.2f} s; "
        f"KV {kv['bytes_peak'] / 2**20:.1f} MiB, full would be {kv['bytes_if_full'] / 2**20:.1f}]",
        file=sys.stderr,
    )


def to_json(llm: LLM, output: RequestOutput) -> dict[str, Any]:
    """Return the object of `retain run --json`."""
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


SHOW_AFTER_S = 0.5  # shorter prefills need no line
ERASE_LINE = "\r\x1b[K"


class PrefillProgress:
    """A line such as `prompt: 1024 of 4096 tokens, 812 tokens/s` on a terminal; nothing on other streams."""

    def __init__(self, file: TextIO | None = None) -> None:
        self.file = file or sys.stderr
        self._enabled = self.file.isatty()
        self._started_at = perf_counter()
        self._first: int | None = None
        self._visible = False

    def update(self, num_computed: int, num_tokens: int) -> None:
        """Show that `num_computed` of `num_tokens` tokens are computed. The speed leaves out what was cached."""
        elapsed = perf_counter() - self._started_at
        if self._first is None:
            self._first = num_computed
            self._started_at = perf_counter()
            elapsed = 0.0
        if not self._enabled or elapsed < SHOW_AFTER_S:
            return
        speed = (num_computed - self._first) / elapsed
        self._write(f"{ERASE_LINE}prompt: {num_computed} of {num_tokens} tokens, {speed:.0f} tokens/s")
        self._visible = True

    def erase(self) -> None:
        """Erase the line, before the answer is printed."""
        if self._visible:
            self._write(ERASE_LINE)
            self._visible = False

    def _write(self, text: str) -> None:
        self.file.write(text)
        self.file.flush()
