"""Random schedules: requests that arrive, are cancelled and preempted in one engine, each drawn from a seed.

    draw_schedule(7)     the seventh schedule; equal seeds give equal schedules

tests/helpers/schedule_runner.py runs them, and compares each request with the same request alone.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from retain.engine.request import Request, RequestInput
from retain.kernels.pool_dtypes import pool_dtype, slots_in_page
from retain.kv.eviction import policies
from retain.kv.eviction.demotion import DEMOTED_DTYPE
from retain.kv.eviction.policy import EvictionPolicy
from retain.sampling_params import SamplingParams
from tests.helpers.backend_variants import ISAS
from tests.helpers.tiny_models import tiny_model

MAX_MODEL_LEN = 512
FAMILIES = ("llama", "gemma3_text", "mpt", "gpt2", "mistral", "qwen2")
SEPARATOR = 11  # a token that separates the messages of a prompt, for reread:ask=repeat
INSTRUCTION = (3, 90, 41, 5)
DRAFTERS = (
    "ngram:k=5,min=1",
    "ngram:min=1",
    "suffix:k=5,min=1",
    "suffix:min=1,factor=4",
    "draft:k=4,model=any",
    "draft:model=any",
    "draft:k=5,weights=int4",
    "self:k=3,budget=48",
    "self:k=7,budget=16,refresh=1",
    "self:k=4,dtype=int4",
    "self:dtype=k8v4",
)


@dataclass(frozen=True)
class PlannedRequest:
    """A request, the engine that it goes to, and the steps of that engine at which it arrives and is cancelled."""

    prompt: tuple[int, ...]
    max_tokens: int
    policy: str
    params: SamplingParams
    salt: str = ""
    num_system_tokens: int = 0
    drafter_name: str = ""
    engine: int = 0  # counts restarts
    arrives_at: int = 0
    cancelled_at: int | None = None

    def build(self) -> Request:
        """Make a new request."""
        return Request(
            RequestInput(
                prompt=list(self.prompt),
                params=self.params,
                policy=parse_policy(self.policy).resolve(len(self.prompt), self.num_system_tokens),
                max_tokens=self.max_tokens,
                num_system_tokens=self.num_system_tokens,
                salt=self.salt,
                owner=self.salt,
                drafter_name=self.drafter_name,
            )
        )


@dataclass(frozen=True)
class Schedule:
    """Requests, and the engines that they run in, one after the other over the same tiers.

    `pool_factor`: pages of the pool, as a multiple of those that its largest request needs. `tiers` are specs; in those
    of disks `{path}` stands for a folder. `restarts` are steps after which one engine is closed with all its requests
    and the next one opened. `preemptions` are steps before which a running request is preempted.
    """

    seed: int
    family: str
    backend: str
    isa: str
    dtype: torch.dtype
    kv_dtype: torch.dtype | None
    page_size: int
    pool_factor: float
    max_batched_tokens: int
    max_running_requests: int
    drafter: str
    draft_error_rate: float
    prefix_cache: str
    tiers: tuple[str, ...]
    restarts: tuple[int, ...]
    preemptions: tuple[int, ...]
    requests: tuple[PlannedRequest, ...]

    @property
    def engine_options(self) -> dict[str, Any]:
        """Arguments of `make_engine` on which the bits of a request depend."""
        parsed = [parse_policy(r.policy) for r in self.requests]
        spec = tiny_model(self.family).spec
        query_heads = max(spec.num_heads // g.num_kv_heads for g in spec.kv_cache.groups)
        columns = query_heads if any(p.per_query_head for p in parsed) else 1
        return {
            "family": self.family,
            "backend": self.backend,
            "dtype": self.dtype,
            "kv_dtype": self.kv_dtype,
            "page_size": self.page_size,
            "max_model_len": MAX_MODEL_LEN,
            "score_columns": columns,
            "demotes": any(p.demotes for p in parsed),
        }


@cache
def parse_policy(spec: str) -> EvictionPolicy:
    """Return the policy of a spec, with an instruction where it has one."""
    policy = policies.parse(spec)
    return policy.with_instruction(INSTRUCTION, {SEPARATOR}) if policy.instruction else policy


def draw_schedule(seed: int, backends: Sequence[str] = ("cpu", "reference")) -> Schedule:
    """Draw a schedule: equal seeds give equal ones, but for the instruction set, which this machine must have."""
    rng = random.Random(seed)
    backend = rng.choices(backends, [1 if b == "reference" else 4 for b in backends])[0]
    family = rng.choice(FAMILIES)
    dtype, kv_dtype = torch.float32, None
    if backend == "cpu" and rng.random() < 0.3:
        dtype = rng.choice([torch.float32, torch.bfloat16])
        kv_dtype = rng.choice([None, torch.int8, torch.uint8, torch.int4])
    page_size = rng.choice([16, 16, 32])
    prefix_cache = rng.choice(["off", "exact", "exact", "exact:keep=prompt"])
    tiers: tuple[str, ...] = ()
    if prefix_cache != "off" and rng.random() < 0.5:
        tiers = rng.choice(
            [
                ("ram:capacity=300kB",),
                ("ram:capacity=10MB",),
                ("disk:path={path},capacity=10MB",),
                ("disk:path={path},capacity=400kB",),
                ("ram:capacity=200kB", "disk:path={path},capacity=10MB"),
            ]
        )
    restarts = tuple(rng.randint(3, 80) for _ in range(rng.choice([0, 1, 1, 2]))) if tiers else ()
    max_running_requests = rng.choice([1, 2, 4, 8])
    isas = ISAS if backend == "cpu" and ISAS else [""]
    head_dim = max(g.k_dim for g in tiny_model(family).spec.kv_cache.groups)
    can_demote = slots_in_page(page_size, head_dim, kv_dtype or dtype, DEMOTED_DTYPE) > page_size
    drafter = rng.choice(DRAFTERS) if rng.random() < 0.6 else ""
    _, _, copy_dtype = drafter.partition("dtype=")
    if copy_dtype and slots_in_page(page_size, head_dim, kv_dtype or dtype, pool_dtype(copy_dtype)) <= page_size:
        drafter = ""  # such a copy saves nothing, and is refused
    return Schedule(
        seed=seed,
        family=family,
        backend=backend,
        isa=isas[int(rng.random() * len(isas))],
        dtype=dtype,
        kv_dtype=kv_dtype,
        page_size=page_size,
        pool_factor=rng.choice([1.0, 1.0, 1.1, 1.4, 2.0, 20.0]),
        max_batched_tokens=max_running_requests + rng.choice([1, 5, 20, 60, 120, 250]),
        max_running_requests=max_running_requests,
        drafter=drafter,
        draft_error_rate=rng.choice([0.0, 0.0, 0.3]),
        prefix_cache=prefix_cache,
        tiers=tiers,
        restarts=restarts,
        preemptions=tuple(rng.randint(1, 80) for _ in range(rng.choice([0, 0, 1, 4]))),
        requests=tuple(draw_requests(rng, family, can_demote, len(restarts))),
    )


def draw_requests(rng: random.Random, family: str, can_demote: bool, num_restarts: int) -> list[PlannedRequest]:
    """Draw requests whose prompts begin alike, some of them equal ones that arrive together."""
    alphabet = rng.choice([128, 128, 9])
    stems = [[rng.randrange(alphabet) for _ in range(rng.randint(1, 170))] for _ in range(rng.randint(1, 3))]
    found: list[PlannedRequest] = []
    arrives_at = 0
    for _ in range(rng.randint(1, 9)):
        stem = rng.choice(stems)
        cut = rng.choice([len(stem), rng.randint(1, len(stem)), len(stem) // 16 * 16 or 1])
        prompt = tuple(stem[:cut] + [rng.randrange(alphabet) for _ in range(rng.choice([0, 1, 5, 16, 40]))])
        if rng.random() < 0.2:
            stems.append(list(prompt))
        arrives_at = rng.choice([arrives_at, arrives_at, rng.randint(0, 60)])
        salt = rng.choice(["", "", "", "a"])
        policy = draw_policy(rng, can_demote)
        engine = rng.randint(0, num_restarts)
        for _ in range(rng.choice([1, 1, 1, 2, 3])):  # n answers to one prompt
            found.append(
                PlannedRequest(
                    prompt=prompt,
                    max_tokens=rng.choice([1, 2, rng.randint(3, 70), rng.randint(3, 70)]),
                    policy=policy if rng.random() < 0.8 else draw_policy(rng, can_demote),
                    params=draw_params(rng),
                    salt=salt,
                    num_system_tokens=rng.choice([0, 0, rng.randint(0, len(prompt) // 4)]),
                    drafter_name=rng.choice(["", "", "", "off"]),
                    engine=engine,
                    arrives_at=arrives_at,
                    cancelled_at=arrives_at + rng.randint(0, 50) if rng.random() < 0.1 else None,
                )
            )
    return found


def draw_params(rng: random.Random) -> SamplingParams:
    """Draw sampling parameters, most of them greedy, all with a seed."""
    return SamplingParams(
        temperature=rng.choice([0.0, 0.0, 0.7, 1.3]),
        top_k=rng.choice([0, 0, 20]),
        top_p=rng.choice([1.0, 1.0, 0.9]),
        repetition_penalty=rng.choice([1.0, 1.0, 1.0, 1.2]),
        seed=rng.randrange(1000),
        ignore_eos=True,
        logprobs=rng.choice([None, 2]),
    )


def draw_policy(rng: random.Random, can_demote: bool) -> str:
    """Draw a policy with random options."""
    while True:
        name = rng.choice(["full", *policies.names()])
        options = draw_options(rng, name, can_demote)
        spec = ":".join(filter(None, [name, ",".join(f"{k}={v}" for k, v in options.items())]))
        try:
            parse_policy(spec)
        except ValueError:  # options that do not go together
            continue
        return spec


def draw_options(rng: random.Random, name: str, can_demote: bool) -> dict[str, Any]:
    """Draw the options of a policy; not all of them need go together."""
    if name == "full":
        return {}
    if name == "ring":
        return {"window": rng.randint(1, 80)}
    parsed = policies.parse(f"{name}:budget=1")
    allowed = vars(parsed).keys()
    draws: dict[str, Callable[[], Any]] = {
        "recent": lambda: rng.choice(["10%", "50%", "100%", rng.randint(1, 20)]),
        "sinks": lambda: rng.randint(0, 6),
        "interval": lambda: rng.randint(1, 20),
        "chunk": lambda: rng.randint(1, 60),
        "prefill": lambda: "stream",
        "share": lambda: rng.choice(["none", "layer", "all"]),
        "protect": lambda: "system",
        "shrink": lambda: rng.choice(["10%", rng.randint(1, 30)]),
        "demote": lambda: rng.choice(["int4", f"int4:{rng.randint(1, 50)}", "int4:30%"]),
        "heads": lambda: rng.choice(["kv-max", "query", "union"]),
        "scope": lambda: "shared",
        "value": lambda: "norm",
        "damping": lambda: rng.choice([0.5, 0.9]),
        "noise": lambda: rng.choice(["gaussian", "none", "constant"]),
        "redraw": lambda: "once",
        "tau": lambda: rng.choice(["1", "2", "0.5..3"]),
        "keep": lambda: "prompt",
        "seed": lambda: rng.randrange(9),
        "stride": lambda: rng.randint(1, 5),
        "queries": lambda: rng.randint(1, 40),
        "mix": lambda: "h2o",
        "rereads": lambda: rng.randint(6, 80),
        "ask": lambda: "repeat",
        "first": lambda: rng.randint(1, 20),
    }
    options: dict[str, Any] = {"budget": rng.choice([f"{rng.randint(5, 100)}%", rng.randint(3, 120)])}
    for key, draw in draws.items():
        if key in allowed and (key != "demote" or can_demote) and rng.random() < 0.3:
            options[key] = draw()
    return options
