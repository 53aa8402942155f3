"""Engines on tiny models, and ways to run their requests with the accountant checked after every step."""

from __future__ import annotations

import itertools
import random
from collections import defaultdict
from collections.abc import Iterator, Sequence
from math import inf
from typing import Any, cast

import torch
from torch import Tensor

from retain import factory, kernels, models
from retain.engine.drafters import Drafter, DrafterNeeds, TargetModel
from retain.engine.engine import Engine
from retain.engine.request import Request, RequestInput
from retain.engine.runner import HeadRunner, ProgramRunner, Runner
from retain.kernels.api import KV
from retain.kernels.slots.pool_dtypes import slots_in_page
from retain.kv.capacity import CacheConfig
from retain.kv.eviction import policies
from retain.kv.eviction.demotion import DEMOTED_DTYPE
from retain.kv.eviction.policy import EvictionPolicy
from retain.kv.manager import KVCacheManager
from retain.kv.memory.group_pages import divide_pages
from retain.kv.prefix import config as prefix_configs
from retain.kv.prefix.cache import PrefixCache
from retain.kv.row import Row
from retain.kv.stores.cost_model import LoadCostModel
from retain.kv.stores.tiers import parse_all
from retain.model_loader import build_key_transform
from retain.models.adapter_bank import AdapterBank
from retain.models.weights import Weights
from retain.processing.detokenizer import IncrementalDetokenizer
from retain.processing.output import OutputProcessor, RequestOutputState
from retain.processing.tokenizer import Tokenizer
from retain.sampling_params import SamplingParams
from tests.helpers.adapters import ADAPTER_RANK, ADAPTERS, fill_bank
from tests.helpers.gates import random_gate
from tests.helpers.ranks import ThreadRanks, lead_threads
from tests.helpers.tiny_heads import load_assistant, tiny_eagle3, with_mtp_layer
from tests.helpers.tiny_models import tiny_checkpoint

GREEDY = SamplingParams(temperature=0, ignore_eos=True, seed=0)  # the seed of a noised policy


class AlwaysLoad(LoadCostModel):
    """Load every prefix that a tier has, whatever the cost model measured."""

    def should_load(
        self, bytes_by_store: dict[str, int], num_tokens: int, latency: float = 0.0, time_limit: float = inf
    ) -> bool:
        return True


class PlanningEngine(Engine):
    """An engine whose requests come from tests: their policies are fitted into its cache, as input processing does."""

    def add(self, *requests: Request) -> None:
        for request in requests:
            request.policy = self.cache.planner.effective_policy(request.policy)
        super().add(*requests)


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
    device: torch.device | None = None,
    dtype: torch.dtype = torch.float32,
    weights: str = "auto",
    kv_dtype: torch.dtype | None = None,
    demotes: bool = False,
    looks: bool = False,
    offload_folder: str = "",
    num_resident: int = 0,
    snapshot_interval: int = 2048,
    prompt_activations: str = "int8",
    adapters: bool = False,
    num_ranks: int = 1,
    rank: ThreadRanks | None = None,
) -> Engine:
    """Build an engine on tiny_model(family), with a pool of `num_pages` pages, of `dtype` or of `kv_dtype`.

    Without a `device` it is the first one that the backend computes on. With an `offload_folder` K and V lie in a file
    there, and `num_resident` slots are resident at most, or all of them. With `adapters` there are those of
    `helpers/adapters.py`. `num_ranks` compute the model in threads;
    `rank` is one of them.
    """
    if num_ranks > 1:
        same = {**locals(), "num_ranks": 1}
        return lead_threads(lambda own: make_engine(**{**same, "rank": own}), num_ranks)
    device = device or torch.device(kernels.import_backend(backend).DEVICES[0])
    kernel = kernels.load(backend, device)
    slot_dtype = kv_dtype or dtype
    program = kernel.program(dtype, device)
    needs = drafter.needs if drafter else DrafterNeeds()
    checkpoint = tiny_checkpoint(family)
    head = None
    bank = AdapterBank(len(ADAPTERS), ADAPTER_RANK, dtype, device) if adapters else None
    if needs.head is None:
        opened = Weights(checkpoint, dtype, weights).with_passes(bank, rank)
        model = models.build(opened, program, needs.hidden_states)
    else:
        eagle = tiny_eagle3(checkpoint.config, needs.head) if needs.head else None
        own = Weights(eagle, dtype, needs.weights, vector_dtype=program.vector_dtype) if eagle else None
        head_program = kernel.program(dtype, device, program)
        checkpoint = checkpoint if eagle else with_mtp_layer(checkpoint)
        opened = Weights(checkpoint, dtype, weights).with_passes(bank)
        model, built = models.build_with_head(opened, program, head_program, own)
        head = HeadRunner(head_program, built.hidden_size, built.restrict)
    if bank:
        fill_bank(bank)
    spec = model.spec.kv_cache
    head_dim = max(g.k_dim for g in spec.groups)
    sizes = page_size, max_running_requests, max_model_len, max_batched_tokens, score_columns
    demoted_page_size = slots_in_page(page_size, head_dim, slot_dtype, DEMOTED_DTYPE) if demotes else 0
    demoted_dtype = DEMOTED_DTYPE if demotes else None
    page_bytes = divide_pages(spec, page_size, slot_dtype, score_columns, demoted_dtype, looks).page_bytes
    memory = (num_pages + 1) * page_bytes
    more = demoted_page_size, snapshot_interval, looks, offload_folder, memory, model.kv_heads
    config = CacheConfig(*sizes, *more)
    cache = factory.build_cache(
        spec,
        config,
        kernel,
        slot_dtype,
        4 * memory + 2**20 if offload_folder else memory,
        prefix_config=prefix_configs.parse(prefix_cache),
        key_transform=build_key_transform(model),
        load_gate=lambda file: random_gate(spec, model.kv_heads),
        device=device,
    )
    for tables in cache.slots.tables if num_resident else ():
        limit_resident_slots(tables.kv, num_resident)
    prefix = cache.prefix_cache
    if tiers and isinstance(prefix, PrefixCache):
        parsed = [t.of_rank(rank.rank, rank.size) if rank else t for t in parse_all(tiers)]
        fingerprint = f"{family} {slot_dtype} {rank and (rank.rank, rank.size)}".encode()
        offloader = factory.open_offload_tiers(prefix.config, parsed, cache, model.spec, fingerprint)
        offloader.cost_model = AlwaysLoad()
        prefix.set_offloader(offloader)
    runner = ProgramRunner(program)

    def load_draft_head(model_name: str, weights: str) -> Runner:
        """Load the tiny assistant of the model; its name says whether it gives logits to few tokens."""
        head = kernel.program(dtype, device, program)
        config = tiny_checkpoint(family).config
        return load_assistant(head, model, config, dtype, model_name == "ordered", weights)

    def load_draft_model(*_: Any) -> tuple[Runner, KVCacheManager]:
        """Load the same model once more, with a cache of its own."""
        other = make_engine(
            family,
            backend=backend,
            max_model_len=max_model_len,
            max_running_requests=max_running_requests,
            device=device,
        )
        return other.runner, other.cache

    if drafter:
        drafter.attach(TargetModel(runner, cache, load_draft_model, lambda _: runner, load_draft_head, head))
    return PlanningEngine(runner, cache, drafter, prompt_activations)


def limit_resident_slots(kv: KV, n: int) -> None:
    """Let n slots of a pool in a file be resident at most."""
    if not kv.resident:
        return
    from retain.kernels.cpu import _C, ffi

    slots = _C.ResidentSlots(kv.num_pages * kv.page_size, n, ffi.to_c_pool(kv).record_bytes)
    object.__setattr__(kv, "resident", slots)  # what has the pool has it as it was allocated


def random_prompts(num_prompts: int, seed: int = 0, max_prompt_len: int = 150) -> list[list[int]]:
    """Return random prompts of mixed lengths."""
    rng = random.Random(seed)
    return [[rng.randrange(128) for _ in range(rng.randint(1, max_prompt_len))] for _ in range(num_prompts)]


def make_request(
    prompt: Sequence[int],
    max_tokens: int = 12,
    policy: str | EvictionPolicy = "full",
    params: SamplingParams = GREEDY,
    num_system_tokens: int = 0,
    **more: Any,
) -> Request:
    """Make a request for `max_tokens` new tokens, with a resolved policy; `more` are fields of RequestInput."""
    parsed = policies.parse(policy) if isinstance(policy, str) else policy
    resolved = parsed.resolve(len(prompt), num_system_tokens)
    return Request(
        RequestInput(list(prompt), params, resolved, max_tokens, num_system_tokens=num_system_tokens, **more)
    )


def row_of(engine: Engine, request: Request) -> Row:
    """Return the row of a running request."""
    return engine.cache.rows[engine.scheduler.running[request].index]


def run_to_completion(engine: Engine, requests: Sequence[Request]) -> list[list[int]]:
    """Run requests together and return their answers. The accountant must balance after every step."""
    for request in requests:
        engine.add(request)
    for _ in iter_steps(engine):
        pass
    assert engine.cache.free_pages == engine.cache.total_pages
    return [r.output_tokens for r in requests]


def record_logits(engine: Engine, requests: Sequence[Request]) -> list[Tensor]:
    """Run requests together, and return the logits [n, V] of each that its steps returned."""
    found: dict[Request, list[Tensor]] = defaultdict(list)
    engine.add(*requests)
    while engine.has_unfinished_requests:
        for request, logits in engine.step().logits.items():
            found[request].append(logits.clone())
        engine.cache.check()
    return [torch.cat(found[request]) for request in requests]


class StopTokenDetokenizer:
    """Record tokens as if they were text, of which a token is the stop string."""

    def __init__(self, stop_token: int | None = None):
        self.stop_token, self.tokens, self.stopped = stop_token, list[int](), False

    def add_token(self, token: int) -> str:
        """Add a token; it has no text."""
        self.tokens.append(token)
        self.stopped |= token == self.stop_token
        return ""


def process_to_completion(engine: Engine, stop_tokens: dict[Request, int | None]) -> list[list[int]]:
    """Run requests with an output processor, and return the tokens of which it made text.

    `stop_tokens` stand in for stop strings.
    """
    processor, detokenizers = OutputProcessor(engine, Tokenizer.__new__(Tokenizer)), []
    for request, stop_token in stop_tokens.items():
        detokenizers.append(StopTokenDetokenizer(stop_token))
        processor.add([RequestOutputState(request, cast(IncrementalDetokenizer, detokenizers[-1]), False)])
    while engine.has_unfinished_requests:
        processor.process(engine.step())
        engine.cache.check()
    assert engine.cache.free_pages == engine.cache.total_pages
    return [detokenizer.tokens for detokenizer in detokenizers]


def iter_steps(engine: Engine) -> Iterator[int]:
    """Step until no request is left. Checks the accountant after every step, and yields the number of the step."""
    for step in itertools.count():
        if not engine.has_unfinished_requests:
            return
        engine.step()
        engine.cache.check()
        yield step


def run_alone(
    family: str, prompt: Sequence[int], max_tokens: int = 12, policy: str = "full", **options: Any
) -> list[int]:
    """Return the answer to a prompt when no other request runs; `options` are those of `make_engine`."""
    return run_to_completion(make_engine(family, **options), [make_request(prompt, max_tokens, policy)])[0]
