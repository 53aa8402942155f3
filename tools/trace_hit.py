"""Show what a prefix hit passes through, from the scheduler to the pages and back, and what it costs.

    python -m tools.trace_hit                  files and records of a hit, in the order in which they are reached
    python -m tools.trace_hit --time           processor time of the prefix cache: a hit of 8k tokens, a miss of 100k

The model is tiny and random, so nothing is loaded. A file counts where it lies in kv and one of its functions runs; a
record where a dataclass or a named tuple of kv is made. The times are medians of those inside the prefix cache.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from time import process_time
from types import FrameType
from typing import Any

import pytest
import torch

import retain
from retain.engine.engine import Engine
from retain.engine.request import Request
from retain.kv.manager import KVCacheManager
from retain.kv.prefix.cache import PrefixCache
from retain.kv.row import Row
from tests.helpers.engines import make_engine, make_request

PACKAGE = Path(retain.__file__).parent
LONG_TEXT = 100_000  # tokens


class HitTrace:
    """The files of kv whose functions run, and the records of kv that are made, in the order of their first use."""

    def __init__(self) -> None:
        self.files: dict[str, int] = {}  # with the number of calls
        self.records: dict[str, int] = {}

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        """Record one event of the interpreter."""
        if event != "call":
            return
        code = frame.f_code
        if code.co_filename.startswith(str(PACKAGE / "kv")):
            name = str(Path(code.co_filename).relative_to(PACKAGE))
            self.files[name] = self.files.get(name, 0) + 1
        elif code.co_filename.startswith("<string") and code.co_name == "__init__":
            self._record(type(frame.f_locals.get("self")))
        elif code.co_name in ("__new__", "<lambda>"):
            self._record(frame.f_locals.get("_cls"))

    def _record(self, cls: Any) -> None:
        if isinstance(cls, type) and cls.__module__.startswith("retain.kv"):
            self.records[cls.__name__] = self.records.get(cls.__name__, 0) + 1


@contextmanager
def traced_starts(trace: HitTrace) -> Iterator[None]:
    """Trace the question where a row may begin, and the row's beginning there."""
    with pytest.MonkeyPatch.context() as patch:
        for cls, name in ((KVCacheManager, "find"), (Row, "start")):
            patch.setattr(cls, name, traced(getattr(cls, name), trace))
        yield


def traced(function: Callable[..., Any], trace: HitTrace) -> Callable[..., Any]:
    """Return a function that is traced."""

    def call(*args: Any, **keywords: Any) -> Any:
        sys.setprofile(trace)
        try:
            return function(*args, **keywords)
        finally:
            sys.setprofile(None)

    return call


def run(engine: Engine, request: Request) -> Request:
    """Compute a request alone."""
    engine.add(request)
    while engine.has_unfinished_requests:
        engine.step()
    return request


def print_trace(family: str, policy: str) -> None:
    """Print the files and records of a hit."""
    engine = make_engine(family, backend="cpu", prefix_cache="exact")
    prompt = [i * 7 % 128 for i in range(100)]
    first = run(engine, make_request(prompt, 4, policy))
    trace = HitTrace()
    with traced_starts(trace):
        request = run(engine, make_request([*first.tokens, 1, 2, 3], 4, policy))
    cached = request.stats.num_cached_tokens
    print(f"{family}, {policy}: {cached} of {len(request.prompt)} tokens cached")
    pages = {name: n for name, n in trace.files.items() if name.startswith("kv/memory/")}
    for title, files in (("files", trace.files.keys() - pages.keys()), ("files of pages (kv/memory)", pages)):
        print(f"{len(files)} {title}: {', '.join(f'{name} ({n})' for name, n in trace.files.items() if name in files)}")
    print(f"{len(trace.records)} records: {', '.join(f'{name} ({n})' for name, n in trace.records.items())}")


class Clock:
    """Processor time inside functions, the outermost of which counts."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._depth = 0

    def wrap(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that is timed."""

        def timed(*args: Any, **keywords: Any) -> Any:
            if self._depth:
                return function(*args, **keywords)
            self._depth = 1
            begin = process_time()
            try:
                return function(*args, **keywords)
            finally:
                self.seconds += process_time() - begin
                self._depth = 0

        return timed


def time_prefix_cache() -> Clock:
    """Return a clock of all methods of the prefix cache."""
    clock = Clock()
    for name, value in list(vars(PrefixCache).items()):
        if callable(value) and not name.startswith("__"):
            setattr(PrefixCache, name, clock.wrap(value))
    return clock


def print_times(num_runs: int) -> None:
    """Print the medians of both cases."""
    clock = time_prefix_cache()
    hits = []
    misses = []
    for seed in range(num_runs):
        generator = torch.Generator().manual_seed(seed)
        text = torch.randint(128, (LONG_TEXT,), generator=generator).tolist()
        engine = make_engine(
            "gemma3_text", backend="cpu", prefix_cache="exact", max_model_len=2**17, max_batched_tokens=2048
        )
        clock.seconds = 0.0
        run(engine, make_request(text, 2))
        misses.append(clock.seconds)
        engine = make_engine("gemma3_text", backend="cpu", prefix_cache="exact", max_model_len=2**14)
        run(engine, make_request(text[:8192], 2))
        clock.seconds = 0.0
        request = run(engine, make_request([*text[:8192], 1], 2))
        assert request.stats.num_cached_tokens > 8000
        hits.append(clock.seconds)
    print(f"hit of 8,192 tokens: {1e3 * median(hits):.2f} ms of processor time ({num_runs} runs, all stores included)")
    print(f"miss of {LONG_TEXT:,} tokens: {1e3 * median(misses):.1f} ms")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the tool."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--family", default="llama")
    parser.add_argument("--policy", default="full")
    parser.add_argument("--time", action="store_true", help="print processor times instead")
    parser.add_argument("--runs", type=int, default=5)
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    if args.time:
        print_times(args.runs)
    else:
        print_trace(args.family, args.policy)
    return 0


if __name__ == "__main__":
    sys.exit(main())
