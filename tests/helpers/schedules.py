"""Random schedules: requests that arrive, are cancelled and preempted in one engine, each drawn from a seed.

    draw_schedule(7)     the seventh schedule; equal seeds give equal schedules

tests/helpers/schedule_runner.py runs them, and compares each request with the same request alone. Some models are of
families that live in tests only: `families_of_tests` makes them known.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, TypeVar

import pytest
import torch

from retain.config import PROMPT_ACTIVATIONS
from retain.engine.request import Request, RequestInput
from retain.kernels.slots.pool_dtypes import INT4, pool_dtype, slots_in_page
from retain.kv.eviction import policies
from retain.kv.eviction.demotion import DEMOTED_DTYPE
from retain.kv.eviction.policy import EvictionPolicy
from retain.models import load_family
from retain.models.decoder import ModelSpec
from retain.options import option_values
from retain.sampling_params import SamplingParams
from tests.helpers.adapters import ADAPTERS, find_adapter
from tests.helpers.backend_variants import ISAS
from tests.helpers.policy_specs import spec_of
from tests.helpers.sink_family import SINKS, add_sink_family
from tests.helpers.state_family import VARIANTS as STATE_VARIANTS
from tests.helpers.state_family import add_state_families
from tests.helpers.tiny_models import CONFIGS, MULTIMODAL, has_states, tiny_model
from tests.helpers.unlike_family import VARIANTS, add_unlike_families

MAX_MODEL_LEN = 512
UNLIKE_FAMILIES = (*VARIANTS, "gemma4_text")  # their layers differ in heads or head dims
STATE_FAMILIES = (*STATE_VARIANTS, *(f for f in CONFIGS if f not in MULTIMODAL and has_states(f)))
FAMILIES = (*(f for f in CONFIGS if f not in (*MULTIMODAL, *UNLIKE_FAMILIES, *STATE_FAMILIES)), SINKS)
POLICY_NAMES = ("full", *policies.names())
SEPARATOR = 11  # a token that separates the messages of a prompt, for reread:ask=repeat
INSTRUCTION = (3, 90, 41, 5)
DRAFTERS = (
    "ngram:k=5,min=1",
    "ngram:min=1",
    "suffix:k=5,min=1",
    "suffix:min=1,factor=4",
    "draft:k=4,model=any",
    "draft:model=any",
    "ngram:k=3,min=2,max=6",
    "suffix:min=2,probability=0.05,memory=100",
)
DRAFTERS_ON_OWN_CACHE = (  # for models whose layers are alike
    "draft:k=5,weights=int4",
    "self:k=3,budget=48",
    "self:k=7,budget=16,refresh=1,decay=0.5",
    "self:k=5,weights=int4",
    "self:k=4,dtype=int4",
    "self:k=3,dtype=int8",
    "self:dtype=k8v4",
)
EAGLE3_HEADS = ("eagle3:k=4,model=plain", "eagle3:model=other,weights=int8")
WITH_MTP_LAYER = tuple(f for f in CONFIGS if hasattr(load_family(f), "MTP_LAYER"))
MTP_DRAFTERS = ("mtp:k=4", "mtp", "mtp:k=7")
DRAFTERS_OF_GEMMA4 = ("assistant:k=4,model=any", "assistant:model=ordered", "assistant:k=7,model=any,weights=int8")
TIERS = (
    ("ram:capacity=300kB",),
    ("ram:capacity=10MB",),
    ("disk:path={path},capacity=10MB",),
    ("disk:path={path},capacity=400kB",),
    ("disk:path={path},capacity=600kB,evict=lfu,read=1GB",),
    ("ram:capacity=200kB", "disk:path={path},capacity=10MB"),
    ("ram:capacity=400kB,evict=lfu", "remote:url=file://{path}/store,refresh=0.01"),
    ("remote:url=file://{path}/store,read=1GB",),
)


@dataclass(frozen=True)
class PlannedRequest:
    """A request, the engine that it goes to, and the steps of that engine at which it arrives and is cancelled."""

    prompt: tuple[int, ...]
    max_tokens: int
    policy: str
    params: SamplingParams
    salt: str = ""
    owner: str = ""
    num_system_tokens: int = 0
    turn_end: int = 0
    forced_tokens: tuple[int, ...] = ()
    stop_ids: frozenset[int] = frozenset()
    needs_logits: bool = False
    needs_prompt_logits: bool = False
    explain_prefix: bool = False
    drafter_name: str = ""
    adapter: str = ""  # one of ADAPTERS
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
                stop_ids=self.stop_ids,
                forced_tokens=list(self.forced_tokens),
                num_system_tokens=self.num_system_tokens,
                turn_end=min(self.turn_end, len(self.prompt)),
                salt=self.salt,
                owner=self.owner,
                drafter_name=self.drafter_name,
                adapter=find_adapter(self.adapter, self.prompt),
                needs_logits=self.needs_logits,
                needs_prompt_logits=self.needs_prompt_logits,
                explain_prefix=self.explain_prefix,
            )
        )


T = TypeVar("T", bound=PlannedRequest)


@dataclass(frozen=True)
class Schedule:
    """Requests, and the engines that they run in, one after the other over the same tiers.

    `pool_factor`: pages of the pool, as a multiple of those that its largest request needs. `tiers` are specs; in those
    of disks `{path}` stands for a folder. `restarts` are steps after which one engine is closed with all its requests
    and the next one opened. `kills` are those of them, counted from 0, at which the next one opens a copy of the folder
    that was made while the first one ran. `preemptions` are steps before which a running request is preempted.
    """

    seed: int
    family: str
    backend: str
    isa: str
    dtype: torch.dtype
    kv_dtype: torch.dtype | None
    weights: str
    prompt_activations: str
    page_size: int
    pool_factor: float
    max_batched_tokens: int
    max_running_requests: int
    drafter: str
    draft_error_rate: float
    prefix_cache: str
    snapshot_interval: int
    tiers: tuple[str, ...]
    restarts: tuple[int, ...]
    preemptions: tuple[int, ...]
    requests: tuple[PlannedRequest, ...]
    kills: tuple[int, ...] = ()
    num_ranks: int = 1

    def on_ranks(self, num_ranks: int) -> Schedule:
        """Return the schedule on several ranks, without what these do not have."""
        drafter = self.drafter if self.drafter.startswith(("ngram", "suffix", "draft:k=4,model", "draft:model")) else ""
        requests = tuple(
            replace(
                r,
                drafter_name=r.drafter_name if drafter else "",
                policy=r.policy.replace("presses.Leverage", "presses.KeyNorm"),  # threads share torch's generator
            )
            for r in self.requests
        )
        return replace(self, num_ranks=num_ranks, drafter=drafter, requests=requests)

    @property
    def offloads(self) -> bool:
        """Whether K and V lie in a file: wherever they can, and no answer depends on it."""
        can_offload = self.backend == "cpu" and self.num_ranks == 1 and (self.kv_dtype or self.dtype) is not INT4
        return can_offload and bool(self.engine_options["looks"])

    @property
    def engine_options(self) -> dict[str, Any]:
        """Arguments of `make_engine` on which the bits of a request depend."""
        parsed = [parse_policy(r.policy) for r in self.requests]
        spec = model_spec(self.family)
        query_heads = max(spec.num_heads // g.num_kv_heads for g in spec.kv_cache.groups)
        columns = query_heads if any(p.per_query_head for p in parsed) else 1
        return {
            "family": self.family,
            "backend": self.backend,
            "dtype": self.dtype,
            "kv_dtype": self.kv_dtype,
            "weights": self.weights,
            "prompt_activations": self.prompt_activations,
            "page_size": self.page_size,
            "max_model_len": MAX_MODEL_LEN,
            "score_columns": columns,
            "demotes": any(p.modes.demote for p in parsed),
            "looks": any(p.looks for p in parsed),
            "adapters": any(r.adapter for r in self.requests),
        }


@contextmanager
def families_of_tests() -> Iterator[None]:
    """Make the families known that live in tests only."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        add_unlike_families(monkeypatch)
        add_state_families(monkeypatch)
        add_sink_family(monkeypatch)
        yield


@cache
def model_spec(family: str) -> ModelSpec:
    """Return the sizes of the tiny model of a family."""
    return tiny_model(family).spec


@cache
def parse_policy(spec: str) -> EvictionPolicy:
    """Return the policy of a spec, with an instruction where it has one."""
    policy = policies.parse(spec)
    return policy.with_instruction(INSTRUCTION, {SEPARATOR}) if policy.instruction else policy


def draw_schedule(seed: int, backends: Sequence[str] = ("cpu", "reference"), families: Sequence[str] = ()) -> Schedule:
    """Draw a schedule: equal seeds give equal ones, but for the instruction set, which this machine must have.

    Without `families` it is one of FAMILIES, or in a fifth of the schedules each of UNLIKE_FAMILIES or STATE_FAMILIES.
    """
    rng = random.Random(seed)
    rng_of_snapshots = random.Random(~seed)  # no answer depends on it: equal seeds stay equal schedules
    backend = rng.choices(backends, [1 if b == "reference" else 4 for b in backends])[0]
    family = rng.choice(families or rng.choice([FAMILIES, FAMILIES, FAMILIES, UNLIKE_FAMILIES, STATE_FAMILIES]))
    dtype, kv_dtype, weights = draw_dtypes(rng, backend)
    page_size = rng.choice([16, 16, 32, 48])
    prefix_cache = rng.choice(["off", "exact", "exact", "exact:keep=prompt"])
    activations = random.Random(f"activations {seed}").choice(PROMPT_ACTIVATIONS)
    prompt_activations = "int8" if weights == "auto" else activations  # others change nothing
    if prefix_cache == "exact" and prompt_activations != "int8":
        prefix_cache = "exact:keep=prompt"  # else a prompt may go on from an answer, whose last bits are others
    tiers = rng.choice(TIERS) if prefix_cache != "off" and rng.random() < 0.5 else ()
    restarts = tuple(rng.randint(3, 80) for _ in range(rng.choice([0, 1, 1, 2]))) if tiers else ()
    max_running_requests = rng.choice([1, 2, 4, 8])
    isas = ISAS if backend == "cpu" and ISAS else [""]
    spec = model_spec(family).kv_cache
    head_dim = max(g.k_dim for g in spec.groups)
    drafter = rng.choice(DRAFTERS + DRAFTERS_ON_OWN_CACHE * (len(spec.groups) == 1)) if rng.random() < 0.6 else ""
    if drafter and family == "gemma4_text" and seed % 4:
        drafter = DRAFTERS_OF_GEMMA4[seed % 4 - 1]
    if drafter and seed % 4 and family in WITH_MTP_LAYER:
        drafter = MTP_DRAFTERS[seed % 4 - 1]
    if drafter and seed % 4 == 3 and family in ("llama", "gpt_oss", *WITH_MTP_LAYER):
        drafter = EAGLE3_HEADS[seed // 4 % 2]
    _, _, copy_dtype = drafter.partition("dtype=")
    if copy_dtype and slots_in_page(page_size, head_dim, kv_dtype or dtype, pool_dtype(copy_dtype)) <= page_size:
        drafter = ""  # such a copy saves nothing, and is refused
    schedule = Schedule(
        seed=seed,
        family=family,
        backend=backend,
        isa=isas[int(rng.random() * len(isas))],
        dtype=dtype,
        kv_dtype=kv_dtype,
        weights=weights,
        prompt_activations=prompt_activations,
        page_size=page_size,
        pool_factor=rng.choice([1.0, 1.0, 1.1, 1.4, 2.0, 20.0]),
        max_batched_tokens=max_running_requests + rng.choice([1, 5, 20, 60, 120, 250]),
        max_running_requests=max_running_requests,
        drafter=drafter,
        draft_error_rate=rng.choice([0.0, 0.0, 0.3]),
        prefix_cache=prefix_cache,
        snapshot_interval=rng_of_snapshots.choice([0, 16, 16, 40, 96, 2048]),
        tiers=tiers,
        restarts=restarts,
        preemptions=tuple(rng.randint(1, 80) for _ in range(rng.choice([0, 0, 1, 4]))),
        requests=(),
    )
    requests = draw_requests(rng, policy_limits(schedule), len(restarts))
    return replace(schedule, requests=draw_adapters(seed, requests))


def draw_adapters(seed: int, requests: Sequence[T]) -> tuple[T, ...]:
    """Let the requests of a quarter of all schedules name adapters, or none. Others stay as they are."""
    rng = random.Random(f"adapters {seed}")
    names = rng.choice([("",), ("",), ("",), ("", *ADAPTERS, "activated")])
    return tuple(replace(request, adapter=rng.choice(names)) for request in requests)


def policy_limits(schedule: Schedule) -> PolicyLimits:
    """Return which policies the model and the pool of a schedule can carry out."""
    s = schedule
    spec = model_spec(s.family).kv_cache
    head_dim = max(g.k_dim for g in spec.groups)
    can_demote = slots_in_page(s.page_size, head_dim, s.kv_dtype or s.dtype, DEMOTED_DTYPE) > s.page_size
    return PolicyLimits(can_demote, spec.can_compare_layers)


def draw_dtypes(rng: random.Random, backend: str) -> tuple[torch.dtype, torch.dtype | None, str]:
    """Draw the dtype of a model, that of its pool where it is another one, and the kind of its weights."""
    if backend != "cpu" or rng.random() < 0.6:
        return torch.float32, None, "auto"
    dtype = rng.choice([torch.float32, torch.bfloat16])
    kv_dtype = rng.choice([None, torch.bfloat16, torch.int8, torch.uint8, torch.int4])
    weights = rng.choice(["auto", "int8", "int4"]) if dtype is torch.bfloat16 else "auto"
    return dtype, None if kv_dtype is dtype else kv_dtype, weights


def draw_requests(rng: random.Random, limits: PolicyLimits, num_restarts: int) -> list[PlannedRequest]:
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
        policy = draw_policy(rng, limits)
        engine = rng.randint(0, num_restarts)
        for _ in range(rng.choice([1, 1, 1, 2, 3])):  # n answers to one prompt
            max_tokens = rng.choice([1, 2, rng.randint(3, 70), rng.randint(3, 70)])
            num_forced = rng.randrange(max_tokens) if rng.random() < 0.1 else 0
            found.append(
                PlannedRequest(
                    prompt=prompt,
                    max_tokens=max_tokens,
                    policy=policy if rng.random() < 0.8 else draw_policy(rng, limits),
                    params=draw_params(rng),
                    salt=salt,
                    owner=rng.choice([salt, salt, "b"]),
                    forced_tokens=tuple(rng.randrange(alphabet) for _ in range(num_forced)),
                    stop_ids=frozenset(rng.sample(range(128), 8)) if rng.random() < 0.1 else frozenset(),
                    needs_logits=rng.random() < 0.05,
                    needs_prompt_logits=rng.random() < 0.05,
                    explain_prefix=rng.random() < 0.1,
                    num_system_tokens=rng.choice([0, 0, rng.randint(0, len(prompt) // 4)]),
                    turn_end=len(prompt) // 2 if len(prompt) % 3 == 0 else 0,
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
        min_p=rng.choice([0.0, 0.0, 0.0, 0.02]),
        min_tokens=rng.choice([0, 0, 10]),
        repetition_penalty=rng.choice([1.0, 1.0, 1.0, 1.2]),
        presence_penalty=rng.choice([0.0] * 9 + [0.5]),
        frequency_penalty=rng.choice([0.0] * 9 + [0.3]),
        logit_bias=rng.choice([()] * 9 + [((7, 3.0), (9, -2.0))]),
        seed=rng.randrange(1000),
        ignore_eos=True,
        logprobs=rng.choice([None, 2]),
    )


@dataclass(frozen=True)
class PolicyLimits:
    """Which policies a model and its pool can carry out, besides those that all can."""

    can_demote: bool = True
    can_compare_layers: bool = True  # see KVCacheSpec

    def allow(self, name: str, policy: EvictionPolicy) -> bool:
        """Return whether the policy of this name is one of them."""
        compares_layers = getattr(policy, "share", "") in ("all", "fitted") or getattr(policy, "scope", "") == "shared"
        needs_alike = compares_layers or name in ("gate", "gate_replay")
        return (self.can_demote or not policy.modes.demote) and (self.can_compare_layers or not needs_alike)


def draw_policy(rng: random.Random, limits: PolicyLimits = PolicyLimits()) -> str:
    """Draw a policy with random options."""
    while True:
        name = rng.choice(POLICY_NAMES)
        options = draw_options(rng, name)
        spec = ":".join(filter(None, [name, ",".join(f"{k}={v}" for k, v in options.items())]))
        try:
            policy = parse_policy(spec)
        except ValueError:  # options that do not go together
            continue
        if limits.allow(name, policy):
            return spec


def draw_options(rng: random.Random, name: str) -> dict[str, Any]:
    """Draw the options of a policy; not all of them need go together."""
    if name == "full":
        return {}
    if name == "ring":
        return {"window": rng.randint(1, 80)}
    if name == "look":
        return {"slots": rng.choice([f"{rng.randint(5, 100)}%", rng.randint(1, 120)]), "min": rng.randint(1, 64)}
    allowed = option_values(parse_policy(spec_of(name, "budget=1")))
    draws: dict[str, Callable[[], Any]] = {
        "recent": lambda: rng.choice(["10%", "50%", "100%", rng.randint(1, 20)]),
        "sinks": lambda: rng.randint(0, 6),
        "interval": lambda: rng.randint(1, 20),
        "chunk": lambda: rng.randint(1, 60),
        "prefill": lambda: rng.choice(["stream", "stream", "exact"]),
        "share": lambda: rng.choice(["none", "layer", "all", "fitted"]),
        "protect": lambda: "system",
        "shrink": lambda: rng.choice(["10%", rng.randint(1, 30)]),
        "demote": lambda: rng.choice(["int4", f"int4:{rng.randint(1, 50)}", "int4:30%"]),
        "heads": lambda: rng.choice(["kv-max", "query", "union"]),
        "scope": lambda: "shared",
        "value": lambda: "norm",
        "damping": lambda: rng.choice([0.5, 0.9]),
        "noise": lambda: rng.choice(["gaussian", "none", "constant"]),
        "redraw": lambda: rng.choice(["once", "4", "64"]),
        "tau": lambda: rng.choice(["1", "2", "0.5..3"]),
        "keep": lambda: "prompt",
        "seed": lambda: rng.randrange(9),
        "stride": lambda: rng.randint(1, 5),
        "queries": lambda: rng.randint(1, 40),
        "mix": lambda: "h2o",
        "rereads": lambda: rng.randint(6, 80),
        "ask": lambda: "repeat",
        "first": lambda: rng.randint(1, 20),
        "block": lambda: rng.randint(5, 90),
        "future": lambda: rng.randint(1, 60),
        "pool": lambda: rng.choice([1, 3, 5]),
        "sketch": lambda: rng.randint(1, 9),
        "refit": lambda: rng.choice([0, 3, 40]),
        "look": lambda: rng.choice([f"{rng.randint(5, 100)}%", rng.randint(1, 120)]),
    }
    options: dict[str, Any] = {"budget": rng.choice([f"{rng.randint(5, 100)}%", rng.randint(3, 120)])}
    for key, draw in draws.items():
        if key in allowed and rng.random() < 0.3:
            options[key] = draw()
    if "demote" in options and "refit" in allowed:
        options["refit"] = 0
    if options.get("refit"):
        options["resume"] = "off"
    if name == "press":
        press = rng.choice(["KeyNorm", "KeyDifference", "ExpectedAttention", "Leverage"])
        options["press"] = f"tests.helpers.presses.{press}"
    if name == "gate" and options.get("prefill") == "stream":
        options["share"] = "none"  # its default divides a whole prompt's budget
    return options
