"""Engines on tiny models, run to the end with the accountant looking after every step."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from types import ModuleType

import torch

from retain import build, kernels, models
from retain.engine.drafters import Drafter, TargetModel
from retain.engine.loop import Engine
from retain.engine.request import Request, SamplingParams
from retain.engine.runner import ProgramRunner, Runner, TorchRunner
from retain.kv import policies
from retain.kv.cache import Cache
from retain.kv.needs import KVCacheSpec
from retain.kv.reuse import parse_prefix_config
from retain.kv.sleep import LoadCostModel
from retain.kv.tiers import parse_all
from retain.models.weights import Weights
from tests.tiny import tiny_checkpoint

GREEDY = SamplingParams(temperature=0, ignore_eos=True)


class Eager(LoadCostModel):
    """Whatever the time: tests read."""

    def should_load(self, bytes_by_store: dict[str, int], num_tokens: int) -> bool:
        return True


def rig(
    family: str,
    *,
    pages: int = 100_000,
    step_tokens: int = 128,
    n_rows: int = 64,
    page_size: int = 16,
    backend: str = "reference",
    context: int = 512,
    columns: int = 1,
    drafter: Drafter | None = None,
    prefix: str = "off",
    tiers: Sequence[str] = (),
    device: torch.device = kernels.CPU,
) -> Engine:
    """An engine on tiny_model(family) in float32, with a pool of so many pages."""
    kernel = kernels.load(backend)
    program = kernel.program(torch.float32, device)
    model = models.build(Weights(tiny_checkpoint(family), torch.float32), program)
    shape = KVCacheSpec(model.spec.num_kv_heads, model.spec.head_dim, model.spec.windows)
    memory = (pages + 1) * kernels.page_bytes(page_size, shape.head_dim, torch.float32, columns)
    turn = model.ropes[0].shift if model.ropes else None
    cache = Cache(
        *(shape, kernel, torch.float32, memory, page_size, n_rows, context, step_tokens, columns, turn, parse_prefix_config(prefix)),
        device,
    )
    if tiers and cache.prefix_cache:
        sleep = build.stores(cache.prefix_cache.config, parse_all(tiers), cache, model.spec, family.encode())
        sleep.cost_model = Eager()
        cache.prefix_cache.set_offloader(sleep)
    runner = ProgramRunner(program, cache) if program else TorchRunner(model, kernel, cache)
    if drafter:
        drafter.attach(TargetModel(runner, cache, lambda *_: other(family, kernel, context, n_rows, device), lambda _: runner))
    return Engine(runner, cache, step_tokens, drafter)


def other(
    family: str, kernel: ModuleType, context: int, n_rows: int, device: torch.device = kernels.CPU
) -> tuple[Runner, Cache]:
    """The same model once more, with a cache of its own."""
    engine = rig(family, backend=kernel.__name__.rpartition(".")[2], context=context, n_rows=n_rows, device=device)
    return engine.runner, engine.cache


def prompts(n: int, seed: int = 0, longest: int = 150) -> list[list[int]]:
    """Random prompts of mixed lengths."""
    rng = random.Random(seed)
    return [[rng.randrange(128) for _ in range(rng.randint(1, longest))] for _ in range(n)]


def request(prompt: Sequence[int], n: int = 12, policy: str = "full", params: SamplingParams = GREEDY) -> Request:
    """A request for n new tokens."""
    return Request(list(prompt), params, policies.parse(policy), n)


def run(engine: Engine, requests: Sequence[Request]) -> list[list[int]]:
    """All of them together; the answers. The accountant must balance after every step and end empty."""
    for r in requests:
        engine.add(r)
    for _ in steps(engine):
        pass
    assert engine.cache.free_pages == engine.cache.total_pages
    return [r.output_tokens for r in requests]


def steps(engine: Engine) -> Iterator[int]:
    """Step until nobody is left, and balance the accounts; after each step its number."""
    for step in itertools.count():
        if not engine.has_unfinished_requests:
            return
        engine.step()
        engine.cache.check()
        yield step


def alone(family: str, prompt: Sequence[int], n: int = 12, **options: object) -> list[int]:
    """What a prompt gives when nobody else is there."""
    policy = str(options.pop("policy", "full"))
    return run(rig(family, **options), [request(prompt, n, policy)])[0]  # type: ignore[arg-type]
