"""Engines on tiny models, run to the end with the accountant looking after every step."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from types import ModuleType

import torch

from retain import factory, kernels, models
from retain.engine.drafters import Drafter, TargetModel
from retain.engine.engine import Engine
from retain.engine.request import Request
from retain.engine.runner import ProgramRunner, Runner, TorchRunner
from retain.kv.capacity import KVCacheSpec
from retain.kv.eviction import policies
from retain.kv.memory.cache import Cache
from retain.kv.offload.cost_model import LoadCostModel
from retain.kv.offload.tiers import parse_all
from retain.kv.prefix.cache import parse_prefix_config
from retain.models.weights import Weights
from retain.sampling_params import SamplingParams
from tests.helpers.tiny_models import tiny_checkpoint

GREEDY = SamplingParams(temperature=0, ignore_eos=True)


class AlwaysLoad(LoadCostModel):
    """Whatever the time: tests read."""

    def should_load(self, bytes_by_store: dict[str, int], num_tokens: int) -> bool:
        return True


def make_engine(
    family: str,
    *,
    num_pages: int = 100_000,
    max_batched_tokens: int = 128,
    max_running_requests: int = 64,
    page_size: int = 16,
    backend: str = "reference",
    max_model_len: int = 512,
    score_columns: int = 1,
    drafter: Drafter | None = None,
    prefix_cache: str = "off",
    tiers: Sequence[str] = (),
    device: torch.device = kernels.api.CPU,
) -> Engine:
    """An engine on tiny_model(family) in float32, with a pool of so many pages."""
    kernel = kernels.load(backend)
    program = kernel.program(torch.float32, device)
    model = models.build(Weights(tiny_checkpoint(family), torch.float32), program)
    shape = KVCacheSpec(model.spec.num_kv_heads, model.spec.head_dim, model.spec.windows)
    memory = (num_pages + 1) * kernels.api.page_bytes(page_size, shape.head_dim, torch.float32, score_columns)
    turn = model.ropes[0].shift if model.ropes else None
    cache = Cache(
        *(
            shape,
            kernel,
            torch.float32,
            memory,
            page_size,
            max_running_requests,
            max_model_len,
            max_batched_tokens,
            score_columns,
            turn,
            parse_prefix_config(prefix_cache),
        ),
        device,
    )
    if tiers and cache.prefix_cache:
        sleep = factory.open_offload_tiers(
            cache.prefix_cache.config, parse_all(tiers), cache, model.spec, family.encode()
        )
        sleep.cost_model = AlwaysLoad()
        cache.prefix_cache.set_offloader(sleep)
    runner = ProgramRunner(program, cache) if program else TorchRunner(model, kernel, cache)
    if drafter:
        drafter.attach(
            TargetModel(
                runner,
                cache,
                lambda *_: make_runner_and_cache(family, kernel, max_model_len, max_running_requests, device),
                lambda _: runner,
            )
        )
    return Engine(runner, cache, max_batched_tokens, drafter)


def make_runner_and_cache(
    family: str,
    kernel: ModuleType,
    max_model_len: int,
    max_running_requests: int,
    device: torch.device = kernels.api.CPU,
) -> tuple[Runner, Cache]:
    """The same model once more, with a cache of its own."""
    engine = make_engine(
        family,
        backend=kernel.__name__.rpartition(".")[2],
        max_model_len=max_model_len,
        max_running_requests=max_running_requests,
        device=device,
    )
    return engine.runner, engine.cache


def random_prompts(num_prompts: int, seed: int = 0, max_prompt_len: int = 150) -> list[list[int]]:
    """Random prompts of mixed lengths."""
    rng = random.Random(seed)
    return [[rng.randrange(128) for _ in range(rng.randint(1, max_prompt_len))] for _ in range(num_prompts)]


def make_request(
    prompt: Sequence[int], max_tokens: int = 12, policy: str = "full", params: SamplingParams = GREEDY
) -> Request:
    """A request for n new tokens."""
    return Request(list(prompt), params, policies.parse(policy), max_tokens)


def run_to_completion(engine: Engine, requests: Sequence[Request]) -> list[list[int]]:
    """All of them together; the answers. The accountant must balance after every step and end empty."""
    for r in requests:
        engine.add(r)
    for _ in iter_steps(engine):
        pass
    assert engine.cache.free_pages == engine.cache.total_pages
    return [r.output_tokens for r in requests]


def iter_steps(engine: Engine) -> Iterator[int]:
    """Step until nobody is left, and balance the accounts; after each step its number."""
    for step in itertools.count():
        if not engine.has_unfinished_requests:
            return
        engine.step()
        engine.cache.check()
        yield step


def run_alone(family: str, prompt: Sequence[int], max_tokens: int = 12, **options: object) -> list[int]:
    """What a prompt gives when nobody else is there."""
    policy = str(options.pop("policy", "full"))
    return run_to_completion(make_engine(family, **options), [make_request(prompt, max_tokens, policy)])[0]  # type: ignore[arg-type]
