"""Run random schedules of requests, and print each difference from the same requests alone with a smaller schedule.

    python -m tools.fuzz --schedules 2000 --seed 0 [--backends cpu,reference] [--depth 2] [--families llama]
    python -m tools.fuzz --conversations --schedules 2000
    python -m tools.fuzz --schedules 2000 --ranks 2

A schedule (tests/helpers/schedules.py) mixes policies, drafters, prefixes, tiers with restarts, cancellations, and
pools down to preemption. One of conversations (tests/helpers/conversations.py) has chats in turns, edits, branches,
repeated prompts, other salts and killed engines; turns that resume equal a conversation without a pause. Of each
difference one line is printed, then a schedule from which requests and options were taken away while a difference
remains. The last line is a summary; the exit status is 1 if there was a difference.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from retain.kernels import triton
from retain.kv.eviction.auto_policy import check_spec
from retain.sampling_params import SamplingParams
from tests.helpers.conversation_runner import ConversationRun
from tests.helpers.conversations import Turn, draw_conversations
from tests.helpers.schedule_runner import Difference, ScheduleRun, num_drafts
from tests.helpers.schedules import PlannedRequest, Schedule, draw_schedule, families_of_tests

PLAIN_REQUEST: dict[str, Any] = {
    "cancelled_at": None,
    "salt": "",
    "owner": "",
    "drafter_name": "",
    "num_system_tokens": 0,
    "forced_tokens": (),
    "stop_ids": frozenset[int](),
    "needs_logits": False,
    "needs_prompt_logits": False,
    "explain_prefix": False,
    "arrives_at": 0,
}
PLAIN_PARAMS: dict[str, Any] = {
    "temperature": 0.0,
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "min_tokens": 0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "logit_bias": (),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Print the differences of some schedules and a summary; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--schedules", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0, help="of the first schedule; the next ones count up")
    parser.add_argument("--backends", default="cpu,reference")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--depth", type=int, default=1, help="pending steps of the engine; 2: they overlap")
    parser.add_argument("--families", default="", help="of the models; by default as they are drawn")
    parser.add_argument("--conversations", action="store_true", help="chats in turns, with budgets that resume")
    parser.add_argument("--ranks", type=int, default=1, help="threads that compute a model together")
    args = parser.parse_args(argv)
    torch.set_num_threads(args.threads)
    if "triton" in args.backends and triton.is_interpreted():
        from tests.helpers.fast_interpreter import speed_up

        speed_up()
    counts = Counter[str]()
    num_differing = 0
    draw = draw_conversations if args.conversations else draw_schedule
    with families_of_tests():
        for seed in range(args.seed, args.seed + args.schedules):
            if (seed - args.seed) % 100 == 99:
                print(f"{seed - args.seed + 1} schedules", file=sys.stderr, flush=True)
            schedule = draw(seed, args.backends.split(","), list(filter(None, args.families.split(","))))
            if args.ranks > 1:
                schedule = schedule.on_ranks(args.ranks)
            num_differing += print_differences(schedule, args.depth, counts)
    summary = ", ".join(f"{n} {name}" for name, n in sorted(counts.items()))
    print(f"{args.schedules} schedules from seed {args.seed}, {num_differing} with differences: {summary}")
    return int(num_differing > 0)


def print_differences(schedule: Schedule, depth: int, counts: Counter[str]) -> bool:
    """Run a schedule, print its differences and a smaller one that has some. Returns whether there were any."""
    found = run_schedule(schedule, depth, counts)
    for difference in found:
        print(f"seed {schedule.seed}: {describe(schedule, difference)}", flush=True)
    if found:
        smaller = minimise(schedule, depth)
        print(f"  smaller: {describe_schedule(smaller)}", flush=True)
        for difference in run_schedule(smaller, depth):
            print(f"    {describe(smaller, difference)}", flush=True)
    return bool(found)


def run_schedule(schedule: Schedule, depth: int, counts: Counter[str] | None = None) -> list[Difference]:
    """Run a schedule in an empty folder. Returns its differences, exceptions among them."""
    with tempfile.TemporaryDirectory() as folder:
        has_turns = any(isinstance(r, Turn) for r in schedule.requests)
        run = (ConversationRun if has_turns else ScheduleRun)(schedule, Path(folder), depth)
        try:
            run.run()
            found = list(run.differences())
        except Exception as error:
            place = traceback.extract_tb(error.__traceback__)[-1]
            where = f"{Path(place.filename).name}:{place.lineno}"
            found = [Difference(None, f"{type(error).__name__} in {where}: {error}")]
    if counts is not None:
        counts.update(requests=len(run.requests), reused_tokens=run.num_reused, loaded_tokens=run.num_loaded)
        counts.update(run.counts)
        for request in run.requests.values():
            counts["preemptions"] += request.stats.num_preemptions
            counts["accepted_drafts"] += num_drafts(request)[1]
            counts["tokens"] += len(request.output_tokens)
    return found


# ---- smaller schedules -----------------------------------------------------------------------------------------------


def minimise(schedule: Schedule, depth: int) -> Schedule:
    """Take requests and options away, one after the other, as long as a difference remains."""
    was_smaller = True
    while was_smaller:
        was_smaller = False
        for smaller in smaller_schedules(schedule):
            if run_schedule(smaller, depth):
                schedule, was_smaller = smaller, True
                break
    return schedule


def smaller_schedules(s: Schedule) -> Iterator[Schedule]:
    """Yield schedules that lack something, those that lack most first."""
    requests = s.requests
    n = len(requests)
    for size in (n // 2, n // 4, 1):
        for begin in range(0, n, size) if size and n > 1 else ():
            yield replace(s, requests=requests[:begin] + requests[begin + size :])
    plain = {
        "drafter": "",
        "draft_error_rate": 0.0,
        "preemptions": (),
        "tiers": (),
        "prefix_cache": "off",
        "kv_dtype": None,
        "weights": "auto",
        "dtype": torch.float32,
        "pool_factor": 20.0,
        "max_running_requests": 8,
        "max_batched_tokens": 258,
        "page_size": 16,
    }
    for name, value in plain.items():
        is_needed = (
            (name == "tiers" and s.restarts)
            or (name == "prefix_cache" and s.tiers)
            or (name == "dtype" and s.weights != "auto")
        )
        if getattr(s, name) != value and not is_needed:
            yield replace(s, **{name: value})
    for i in range(len(s.preemptions)):
        yield replace(s, preemptions=s.preemptions[:i] + s.preemptions[i + 1 :])
    if s.restarts:
        fewer = tuple(replace(r, engine=min(r.engine, len(s.restarts) - 1)) for r in requests)
        yield replace(s, restarts=s.restarts[:-1], requests=fewer)
    for i, request in enumerate(requests):
        for shorter in smaller_requests(request):
            yield replace(s, requests=(*requests[:i], shorter, *requests[i + 1 :]))


def smaller_requests(r: PlannedRequest) -> Iterator[PlannedRequest]:
    """Yield requests that lack something."""
    for name, value in PLAIN_REQUEST.items():
        if getattr(r, name) != value:
            yield replace(r, **{name: value})
    for name, value in PLAIN_PARAMS.items():
        if getattr(r.params, name) != value:
            yield replace(r, params=replace(r.params, **{name: value}))
    name, _, options = r.policy.partition(":")
    parts = options.split(",") if options else []
    for k, part in enumerate(parts):
        if not part.startswith(("budget=", "window=", "slots=")):
            without = f"{name}:{','.join(parts[:k] + parts[k + 1 :])}"
            with suppress(ValueError):  # some options need others
                check_spec(without)
                yield replace(r, policy=without)
    for max_tokens in {r.max_tokens // 2, r.max_tokens - 1} - {0}:
        if max_tokens < r.max_tokens:
            yield replace(r, max_tokens=max_tokens)
    for k in {len(r.prompt) // 2, len(r.prompt) - 1} - {0}:
        if k < len(r.prompt):
            yield replace(r, prompt=r.prompt[:k])


# ---- descriptions ----------------------------------------------------------------------------------------------------


def describe(schedule: Schedule, difference: Difference) -> str:
    """Describe a difference in one line."""
    s = schedule
    engine = " ".join(filter(None, [s.family, s.backend, s.isa, str(s.dtype)[6:], s.kv_dtype and str(s.kv_dtype)[6:]]))
    if difference.index is None:
        return f"{engine}: {difference.description}"
    planned = s.requests[difference.index]
    return f"{engine}: request {difference.index} ({planned.policy}): {difference.description}"


def describe_schedule(schedule: Schedule) -> str:
    """Describe a schedule in one line, without what is at its default."""
    s = schedule
    fields = {f.name: getattr(s, f.name) for f in dataclasses.fields(s) if f.name not in ("requests", "seed")}
    requests = [
        " ".join([f"[{len(r.prompt)}+{r.max_tokens}", r.policy, *describe_fields(r, PLAIN_REQUEST | {"engine": 0})])
        + f" {' '.join(describe_fields(r.params, PLAIN_PARAMS) + describe_parent(r))}]"
        for r in s.requests
    ]
    return " ".join([*(f"{k}={v}" for k, v in fields.items() if v not in ("", (), None, 0.0)), *requests])


def describe_parent(request: PlannedRequest) -> list[str]:
    """Say from which turn of a conversation a request goes on."""
    if not isinstance(request, Turn):
        return []
    return [f"number={request.number} parent={request.parent} num_dropped={request.num_dropped}"]


def describe_fields(value: PlannedRequest | SamplingParams, plain: dict[str, Any]) -> list[str]:
    """Describe the fields that are not as in the plain one."""
    return [f"{name}={getattr(value, name)}" for name, other in plain.items() if getattr(value, name) != other]


if __name__ == "__main__":
    sys.exit(main())
