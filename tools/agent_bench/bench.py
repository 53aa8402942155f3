"""How many sessions of a coding agent a cache holds at once, and what that costs.

Sessions wait, think and go on (see replay.py); all methods have the same `--kv-memory`. Where it is too small,
histories are computed again: a history is what a turn's prompt has in common with the turn before it. `found_share` is
the share of the tokens of all histories that were found cached. `most_sessions` is the largest number of sessions at
which it was at least `--min-found`. Where a single turn exceeds the memory nothing counts as found. Tiers are memory
beside `--kv-memory`.

`kl` is the distance from the full cache before every token of the recorded answers, in nats; its interval is a
bootstrap over answers. It is 0 for methods that keep everything in the engine's own precision.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory, gettempdir
from typing import Any, Self

import numpy as np

from retain.bench.quality import bootstrap_interval
from retain.config import KV_DTYPES, Config
from retain.kv.eviction.auto_policy import check_spec
from retain.kv.stores import tiers
from retain.llm import LLM
from retain.plugins import parse_spec
from tools.agent_bench.coding_agent import CodingAgent
from tools.agent_bench.config import AgentBenchConfig
from tools.agent_bench.hints import AgentHints
from tools.agent_bench.recording import Turn, read_conversations, to_sessions, write_conversations
from tools.agent_bench.replay import OutOfMemoryError, References, Replay, TurnResult, score_references

MAX_REFERENCE_BYTES = 8 * 2**30  # of the full cache's predictions

Line = dict[str, Any]
Load = Callable[[Config], LLM]


@dataclass(frozen=True)
class Method:
    """What a session keeps, and where. Written as words: a policy, and a dtype of K and V or tiers where wanted."""

    name: str
    policy: str
    kv_dtype: str
    tiers: tuple[str, ...]

    @classmethod
    def parse(cls, text: str) -> Self:
        """Return the method that words describe. Raises ValueError."""
        words = text.split()
        dtypes = [word for word in words if word in KV_DTYPES]
        stores = [word for word in words if parse_spec(word)[0] in tiers.names()]
        chosen = [word for word in words if word not in (*dtypes, *stores)]
        if len(chosen) != 1 or len(dtypes) > 1:
            raise ValueError(f"method {text!r} should be a policy with at most one dtype of K and V, and tiers")
        check_spec(chosen[0])
        tiers.parse_all([_in_folder(spec, "FOLDER") for spec in stores])
        return cls(" ".join(words), chosen[0], dtypes[0] if dtypes else "auto", tuple(stores))

    def configure(self, config: Config, folder: str) -> Config:
        """Return the options of an engine. Tiers on a disk without a path are in the folder."""
        stores = tuple(_in_folder(spec, folder) for spec in self.tiers)
        return replace(config, kv_policy=self.policy, kv_dtype=self.kv_dtype, tier=stores)


def _in_folder(spec: str, folder: str) -> str:
    name, options = parse_spec(spec)
    return f"{spec}{',' if options else ':'}path={folder}" if name == "disk" and "path" not in options else spec


def run(load: Load, engine: Config, config: AgentBenchConfig, methods: Sequence[Method]) -> Iterator[Line]:
    """Yield a line for each method and number of sessions, then one for each method. Raises ValueError or OSError."""
    _check_folders(config, methods)
    sessions, references = _prepare(load, engine, config)
    most: dict[str, int] = {}
    for method in methods:
        for line in _run_method(load, engine, config, method, sessions, references):
            yield line
            if line["found_share"] >= config.min_found:
                most[method.name] = line["sessions"]
    first = most.get(methods[0].name, 0)
    for method in methods:
        fit = most.get(method.name, 0)
        yield {"method": method.name, "most_sessions": fit, "times_first": round(fit / first, 2) if first else None}


def _check_folders(config: AgentBenchConfig, methods: Iterable[Method]) -> None:
    """Raise ValueError for a folder in which nothing can be written, before anything is computed."""
    store_dir = config.store_dir or Path(gettempdir())
    for folder in (store_dir, *([config.save_recording.parent] if config.save_recording else [])):
        if not folder.is_dir():
            raise ValueError(f"{folder} is no folder")
    for method in methods:
        tiers.parse_all([_in_folder(spec, str(store_dir)) for spec in method.tiers])


def _prepare(load: Load, engine: Config, config: AgentBenchConfig) -> tuple[list[list[Turn]], References]:
    """Return the sessions, and what the full cache predicts in the first of them."""
    num_sessions = max(config.sessions)
    recorded = read_conversations(config.recording) if config.recording else None
    llm = load(replace(engine, kv_memory=None))
    if recorded is None:
        agent = CodingAgent(config, lambda text: len(llm.tokenizer.encode(text, add_special_tokens=False)))
        recorded = agent.make_sessions(num_sessions)
    if config.save_recording:
        write_conversations(config.save_recording, recorded)
    sessions = to_sessions(llm, recorded, config.seed, config.pause, llm.max_model_len)
    if len(sessions) < num_sessions:
        raise ValueError(f"--sessions asks for {num_sessions}, and {len(sessions)} have a turn that fits the context")
    num_scored = sum(len(turn.answer) for turns in sessions[: config.kl_sessions] for turn in turns)
    if (num_bytes := num_scored * llm.spec.vocab_size * 2) > MAX_REFERENCE_BYTES:
        raise ValueError(f"--kl-sessions {config.kl_sessions} needs {num_bytes / 1e9:.1f} GB: give fewer sessions")
    references = score_references(llm, sessions[: config.kl_sessions])
    llm.close()
    return sessions, references


def _run_method(
    load: Load,
    engine: Config,
    config: AgentBenchConfig,
    method: Method,
    sessions: Sequence[Sequence[Turn]],
    references: References,
) -> Iterator[Line]:
    """Yield a line for each number of sessions, up to the first at which too few tokens are found."""
    for num_sessions, kind in product(sorted(config.sessions), config.hints):
        gc.collect()  # the pool of the engine before
        with TemporaryDirectory(prefix="retain-bench-", dir=config.store_dir) as folder:
            options = method.configure(engine, folder)
            # The salt is new, so that nothing is found in a store with a path of its own.
            hints = AgentHints(kind, config.estimate_error, config.step_time)
            figures = _replay(load, options, sessions[:num_sessions], references, hints, salt=folder)
        found = {"method": method.name, "sessions": num_sessions, "hints": kind, "min_found": config.min_found}
        yield found | figures
        if figures["found_share"] < config.min_found:
            break


def _replay(
    load: Load,
    options: Config,
    sessions: Sequence[Sequence[Turn]],
    references: References,
    hints: AgentHints,
    salt: str,
) -> Line:
    """Return the figures of a replay in an engine of its own, of which nothing is left afterwards."""
    llm = load(options)
    replay = Replay(llm, sessions, references, hints, salt)
    try:
        replay.run()
    except OutOfMemoryError as error:
        return {"found_share": 0.0, "error": str(error)}
    finally:
        llm.close()  # else a tier would write into a folder that is removed
    return summarize(replay.results, replay.seconds)


def summarize(results: Sequence[TurnResult], seconds: float) -> Line:
    """Return the figures of a replay."""
    later = [r for r in results if r.turn]
    num_known = sum(r.num_known for r in later)
    ttft_ms = [1e3 * (r.ttft_s or 0.0) for r in later or results]
    line: Line = {
        "turns": len(results),
        "longest_prompt": max(r.num_prompt for r in results),
        "found_share": round(sum(r.num_found for r in later) / num_known, 4) if num_known else 1.0,
        "ttft_p50_ms": round(float(np.median(ttft_ms)), 1),
        "ttft_p95_ms": round(float(np.quantile(ttft_ms, 0.95)), 1),
        "tok_s": round(sum(r.num_answer for r in results) / seconds, 1),
        "num_preemptions": sum(r.num_preemptions for r in results),
    }
    scored = [(r.distance, r.num_answer) for r in results if r.distance]
    if scored:
        kl = np.array([d.kl / n for d, n in scored])
        low, high = bootstrap_interval(kl)
        line |= {
            "answers_scored": len(scored),
            "kl": round(float(kl.mean()), 5),
            "kl_ci95": [round(low, 5), round(high, 5)],
            "top1_agreement": round(sum(d.num_agreed for d, _ in scored) / sum(n for _, n in scored), 4),
        }
    return line
