"""The factory: builds an engine, or a part of one, from a configuration. Does not depend on: requests."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from typing import Any, NamedTuple

import torch
from xxhash import xxh3_128

from retain import kernels, models
from retain.config import Config, check_weights, default_kv_memory
from retain.engine import drafters
from retain.engine.drafters import Drafter, TargetModel
from retain.engine.engine import Engine
from retain.engine.runner import HeadRunner, Runner
from retain.engine.tensor_parallel import Driver, RankGroup
from retain.formats.checkpoint import list_model_files
from retain.formats.lora import LoRAAdapter, read_lora
from retain.formats.pooling import Pooling
from retain.kernels.api import CPU, Backend, Program
from retain.kernels.slots.kv_cache_spec import KVCacheSpec
from retain.kernels.slots.pool_dtypes import pool_dtype, slots_in_page
from retain.kv.capacity import CacheConfig, CapacityPlanner, refuse_gates
from retain.kv.eviction import policies
from retain.kv.eviction.auto_policy import AutoPolicy, check_spec
from retain.kv.eviction.demotion import DEMOTED_DTYPE
from retain.kv.eviction.gate_weights import Gate
from retain.kv.eviction.policy import EvictionPolicy
from retain.kv.eviction.view import KeyTransform
from retain.kv.manager import KVCacheManager
from retain.kv.memory.group_pages import divide_pages, first_attention_group, fold_states
from retain.kv.memory.page_store import PageStore
from retain.kv.memory.pool import PagePool
from retain.kv.prefix import config as prefix_configs
from retain.kv.prefix.config import PrefixConfig, SelectiveConfig
from retain.kv.stores import tiers
from retain.kv.stores.offloader import Offloader
from retain.kv.stores.selective.block_cache import BlockCache
from retain.kv.stores.selective.repack import ProbeConfig
from retain.kv.stores.span import SpanFormat
from retain.kv.stores.tiers import disk, ram
from retain.model_loader import LoadedModel, ProgramOptions, load_model, load_with_tokenizer
from retain.models.adapter_bank import AdapterBank
from retain.models.decoder import ModelSpec
from retain.models.heads import HeadTarget
from retain.models.resolve import resolve_model
from retain.models.weights import open_weights
from retain.plugins import parse_spec
from retain.processing.adapters import Adapters, parse_loras
from retain.processing.chat_template import read_chat_template
from retain.processing.input import EngineInfo, InputProcessor
from retain.processing.output import OutputProcessor
from retain.processing.tokenizer import Tokenizer

DEFAULT_RANK = 16  # of adapters, where the engine starts with none
log = logging.getLogger(__name__)

# What stored keys are. It is part of a store's fingerprint, so change it with them.
CACHED_KEYS = "less mean offset, balanced"


@dataclass(eq=False, repr=False)
class EngineParts:
    """An engine with its model and its cache, and what turns texts into its requests and back."""

    config: Config
    device: torch.device
    spec: ModelSpec
    program: Program
    pooling: Pooling | None  # None: the model generates
    tokenizer: Tokenizer
    max_model_len: int
    policy: EvictionPolicy  # of requests that name none
    cache: KVCacheManager
    engine: Engine
    target: TargetModel  # what a drafter may use
    input_processor: InputProcessor
    output_processor: OutputProcessor


class ParsedOptions(NamedTuple):
    """Options that are parsed before a model is loaded, so that a wrong one is refused early."""

    prefix: PrefixConfig | None
    tiers: list[tiers.Tier]
    offload: tuple[str, int]  # the folder and the bytes of the pool's file
    drafter: Drafter | None
    chat_template: str | None
    loras: dict[str, LoRAAdapter]  # by name


def build_engine(
    c: Config, progress: bool = False, later_drafters: Sequence[str] = (), ranks: RankGroup | None = None
) -> EngineParts:
    """Load a model, and build its cache, its engine and what is around them. Raises ValueError or OSError.

    `later_drafters` are named when the engine is there: its program gives what they read. `ranks`: this rank and the
    others that load parts of the model now; the first one leads.
    """
    options = parse_options(c)
    device = kernels.resolve_device(c.device)
    if ranks and device.type == "cuda":
        device = torch.device("cuda", ranks.rank)
        torch.cuda.set_device(device)
    backend = load_backend(c, device)
    needs = drafters.join_needs(d for d in (options.drafter, *map(drafters.parse, later_drafters)) if d)
    if ranks and needs.hidden_states:
        raise ValueError("draft heads do not go with tensor_parallel: use ngram, suffix or draft:model=M")
    bank = build_bank(c, options.loras, device)
    loaded, tokenizer, pooling = load_with_tokenizer(c, backend, device, progress, ProgramOptions(needs, bank, ranks))
    tokenizer.choose_chat_template(options.chat_template, name=c.chat_template)
    spec = loaded.spec
    max_model_len = resolve_max_model_len(c.max_model_len, spec.max_position_embeddings)
    auto = AutoPolicy(loaded.gate_loader().policy_names, spec.kv_cache.can_compare_layers)
    allowed = [policies.parse(auto.choose(name)) for name in (c.kv_policy, *c.allow_policy)]  # there is room for them
    kv_heads = min((g.num_kv_heads for g in spec.kv_cache.attention_groups), default=spec.num_heads)
    query_heads = spec.num_heads // kv_heads  # of a kv head
    kv_dtype = pool_dtype(c.slot_dtype)
    cache_config = CacheConfig(
        c.slots_per_page,
        c.max_running_requests,
        max_model_len,
        c.max_batched_tokens,
        query_heads if any(p.per_query_head for p in allowed) else 1,
        demoted_page_size(allowed, c.slots_per_page, max(g.k_dim for g in spec.kv_cache.groups), kv_dtype),
        c.snapshot_interval,
        any(p.looks for p in allowed),
        *options.offload,
        kv_heads=loaded.kv_heads,
    )
    kv_memory = c.kv_memory or default_pool_bytes(cache_config, spec, kv_dtype, device)
    if ranks:
        is_shared = c.kv_memory or device.type == "cpu"
        kv_memory = ranks.least(kv_memory // ranks.size if is_shared else kv_memory)
        if not backend.EXCHANGES_IN_MEMORY:
            ranks.connect(device)
    cache = build_cache(
        spec.kv_cache,
        cache_config,
        backend,
        kv_dtype,
        kv_memory,
        prefix_config=options.prefix,
        key_transform=loaded.key_transform,
        load_gate=loaded.gate_loader(getattr(allowed[0], "file", "")),
        device=device,
    )
    warn_of_windows(allowed, spec)
    if options.prefix and (options.tiers or isinstance(options.prefix, SelectiveConfig)):
        own_tiers = [t.of_rank(ranks.rank, ranks.size) for t in options.tiers] if ranks else options.tiers
        cache.prefix_cache.set_offloader(build_offload(c, options.prefix, own_tiers, cache, loaded, ranks))
    driver = Driver(cache, ranks) if ranks and ranks.rank == 0 else None
    engine = Engine(loaded.runner, cache, options.drafter, c.prompt_activations)
    if device.type != "cpu" and not ranks:  # the values of pending tokens are not on other ranks
        engine.depth = 2  # so that the device waits for the host as little as it can
    target = build_target(c, loaded, cache, tokenizer, cache_config)
    info = EngineInfo(
        vocab_size=spec.vocab_size,
        heads_per_kv_head=query_heads,
        max_model_len=max_model_len,
        policy=allowed[0],
        allowed_policies=allowed,
        has_default_drafter=options.drafter is not None,
        auto=auto,
        has_head=pooling is None,
    )
    adapters = Adapters(bank)
    for name, lora in options.loras.items():
        adapters.add(name, lora)
    if driver:
        adapters.on_write = driver.load_adapter
    parts = EngineParts(
        config=c,
        device=device,
        spec=spec,
        program=loaded.runner.program,
        pooling=pooling,
        tokenizer=tokenizer,
        max_model_len=max_model_len,
        policy=allowed[0],
        cache=cache,
        engine=engine,
        target=target,
        input_processor=InputProcessor(tokenizer, info, cache, partial(add_drafter, engine, target), adapters),
        output_processor=OutputProcessor(engine, tokenizer),
    )
    if options.drafter and not (ranks and ranks.rank):
        attach_drafter(options.drafter, target)
    return parts


def parse_options(c: Config) -> ParsedOptions:
    """Return the options of specs and files. Raises ValueError for one that is wrong."""
    for spec in (c.kv_policy, *c.allow_policy):
        check_spec(spec)
    prefix = prefix_configs.parse(c.prefix_cache)
    tier_configs = tiers.parse_all(c.tier)
    if tier_configs and not prefix:
        raise ValueError("prefix_cache=off keeps nothing: there is nothing for a tier")
    drafter = drafters.parse(c.speculate) if c.speculate else None
    template = read_chat_template(c.chat_template)
    loras = {name: read_lora(folder) for name, folder in parse_loras(c.lora).items()}
    return ParsedOptions(prefix, tier_configs, parse_offload(c), drafter, template, loras)


def build_bank(c: Config, loras: Mapping[str, LoRAAdapter], device: torch.device) -> AdapterBank | None:
    """Return room for adapters; None where there will be none. Raises ValueError for more than there is room for."""
    size = c.max_loras or len(loras)
    if not size:
        return None
    largest = max((lora.rank for lora in loras.values()), default=DEFAULT_RANK)
    if len(loras) > size:
        raise ValueError(f"max_loras is {size}, and there are {len(loras)} adapters")
    return AdapterBank(size, c.max_lora_rank or largest, pool_dtype(c.dtype), device)


def parse_offload(c: Config) -> tuple[str, int]:
    """Return the folder of the pool's file, empty where it has none, and its bytes. Raises ValueError."""
    if c.kv_offload is None:
        return "", 0
    name, given = parse_spec(c.kv_offload)
    if name != "disk" or not given.keys() <= {"path", "capacity"}:
        raise ValueError(f"kv_offload is disk:path=DIR,capacity=SIZE, not {c.kv_offload!r}")
    offload = tiers.parse(c.kv_offload)
    assert isinstance(offload, disk.Tier)
    if not any(check_spec(spec).looks for spec in (c.kv_policy, *c.allow_policy)):
        raise ValueError("kv_offload is for answers that look, and no policy here does, such as look:slots=1024")
    return offload.path, offload.capacity


def load_backend(c: Config, device: torch.device) -> Backend:
    """Return the backend of a configuration. Raises ValueError where it cannot do what is asked for."""
    backend = kernels.load(c.backend, device)
    if c.kv_dtype != "auto":
        kernels.check_pool_dtype(backend, pool_dtype(c.slot_dtype))
    kernels.check_prompt_activations(backend, c.prompt_activations)
    return backend


def resolve_max_model_len(given: int | None, limit: int) -> int:
    """Return the tokens of the longest text of a model whose own limit is `limit`. Raises ValueError."""
    if given and given > limit:
        raise ValueError(f"max_model_len {given} is longer than the model's own context, {limit}")
    return given or limit


def warn_of_windows(allowed: Sequence[EvictionPolicy], spec: ModelSpec) -> None:
    """Say in the log in how many layers a budget evicts, where it is not all of them."""
    if any(p.has_budget for p in allowed) and spec.kv_cache.has_states:
        num_full = len(spec.kv_cache.full_caches)
        text = "budgets apply to full attention, in %d of %d layers: windows and states keep what they need"
        num_heads = sum(group.is_draft for group in spec.kv_cache.groups)
        log.warning(text, num_full, spec.num_layers - num_heads)


def build_target(
    c: Config, target: LoadedModel, cache: KVCacheManager, tokenizer: Tokenizer, cache_config: CacheConfig
) -> TargetModel:
    """Return what a drafter may use of an engine: its model, its cache, and how other models are loaded."""
    dtype = pool_dtype(c.dtype)
    device = cache.kv.device
    longest = cache_config.max_model_len

    def load(model: str | None, weights: str) -> LoadedModel:
        """Load another model, or this one, with these weights. Raises ValueError where its vocabulary differs."""
        path = resolve_model(model or c.model)
        check_weights(weights, c.dtype)
        if model and not tokenizer.has_same_vocab(Tokenizer.open(path)):
            raise ValueError(f"{model} has another vocabulary than {c.model}, so it cannot draft for it")
        return load_model(path, cache.backend, dtype, weights, device=device, context_limit=longest)

    def load_draft_model(model: str, weights: str) -> tuple[Runner, KVCacheManager]:
        """Load a model beside this one, with a cache for as many tokens."""
        loaded = load(model, weights)
        spec = loaded.spec
        kv_dtype = pool_dtype(c.slot_dtype)
        config = replace(cache_config, score_columns=1, has_sketches=False, offload_folder="")
        block = cache.planner.block_size
        num_tokens = ((cache.total_pages + 1) // cache.planner.pages_of_text(block) + 1) * block
        draft_cache = build_cache(
            spec.kv_cache,
            replace(config, max_model_len=min(longest, spec.max_position_embeddings), demoted_page_size=0),
            cache.backend,
            kv_dtype,
            text_bytes(config, spec, kv_dtype, num_tokens),
            device=device,
        )
        return loaded.runner, draft_cache

    def load_draft_head(model: str, weights: str) -> Runner:
        """Load a head that was trained for this model. It shares the token embeddings."""
        if target.embedding is None:
            raise ValueError("it reads hidden states: name it when the engine starts, for a model that generates")
        path = resolve_model(model)
        program = cache.backend.program(dtype, device, target.runner.program)
        opened = open_weights(path, dtype, weights, vector_dtype=program.vector_dtype, context_limit=longest)
        shared = HeadTarget(target.spec, target.embedding, target.key_transform.factors)
        head = models.build_head(opened, shared, program)
        return HeadRunner(program, head.hidden_size, head.restrict)

    return TargetModel(
        target.runner,
        cache,
        load_draft_model,
        lambda weights: load(None, weights).runner,
        load_draft_head,
        target.head,
    )


def add_drafter(engine: Engine, target: TargetModel, spec: str) -> None:
    """Let requests name this drafter. Raises ValueError."""
    if spec not in engine.speculator.named:
        drafter = drafters.parse(spec)
        drafter.attach(target)
        engine.speculator.named[spec] = drafter


def attach_drafter(drafter: Drafter, target: TargetModel) -> None:
    """Prepare a drafter for an engine. Where it fails, the store on the disk is free for others again."""
    try:
        drafter.attach(target)
    except BaseException:
        target.cache.prefix_cache.close_offloader()
        raise


def build_cache(
    spec: KVCacheSpec,
    config: CacheConfig,
    backend: Backend,
    dtype: torch.dtype,
    memory_bytes: int,
    *,
    prefix_config: PrefixConfig | None = None,
    key_transform: KeyTransform | None = None,
    load_gate: Callable[[str], Gate] = refuse_gates,
    device: torch.device = CPU,
) -> KVCacheManager:
    """Build a cache of at most `memory_bytes`, and no more than all rows could ever use.

    Raises ValueError or OSError, where K and V lie in a file.
    """
    demoted_dtype = DEMOTED_DTYPE if config.demoted_page_size else None
    spec = fold_states(spec, config.page_size, dtype)
    pages = divide_pages(spec, config.page_size, dtype, config.score_columns, demoted_dtype, config.has_sketches)
    planner = CapacityPlanner(spec, config, load_gate, pages=pages)
    size = pages.page_bytes
    size_in_file = sum(pages.key_and_value_bytes)
    num_pages = config.offload_bytes // size_in_file - 1 if config.offload_folder else memory_bytes // size
    most = config.max_running_requests * planner.max_pages
    most = min(most, 2**31 // max(f.page_size for f in (*pages.formats, *filter(None, pages.demoted_formats))) - 1)
    pool = PagePool(1 + min(max(num_pages - 1, 0), most))  # the trash page counts too
    f = pages.formats[first_attention_group(spec)]
    page_bytes = pages.key_and_value_bytes
    if config.offload_folder:
        remaining = memory_bytes - pool.num_pages * (size - size_in_file)
        num_kinds = sum(format.has_sketches for format in pages.formats)
        folder = disk.expand_path(config.offload_folder)
        kv = backend.allocate_in_file(pool.num_pages, f, page_bytes, folder, remaining // max(num_kinds, 1))
    else:
        sizes = f.page_size, f.k_dim, f.dtype, f.score_columns
        kv = backend.allocate(pool.num_pages, *sizes, device, f.v_dim, page_bytes)
    kv = kv.with_sketches(f.sketch_bytes)
    slots = ", ".join(str(f.page_size) for f in pages.formats)
    where = f", K and V in a file in {config.offload_folder}" if config.offload_folder else ""
    log.info("KV pool: %d pages of %s slots, %.1f MiB%s", pool.num_pages, slots, pool.num_pages * size / 2**20, where)
    if any(pages.unused_bytes):
        log.info("KV pool: bytes of a page that slots of each group leave unused: %s", pages.unused_bytes)
    return KVCacheManager(planner, PageStore(pool, kv, backend, size), prefix_config, key_transform)


def text_bytes(config: CacheConfig, spec: ModelSpec, dtype: torch.dtype, num_tokens: int) -> int:
    """Return the bytes of the pages that keep a text whole."""
    layers = fold_states(spec.kv_cache, config.page_size, dtype)
    pages = divide_pages(layers, config.page_size, dtype, config.score_columns, None, config.has_sketches)
    return CapacityPlanner(layers, config, pages=pages).pages_of_text(num_tokens) * pages.page_bytes


def default_pool_bytes(config: CacheConfig, spec: ModelSpec, dtype: torch.dtype, device: torch.device) -> int:
    """Return the bytes of a pool by what the machine has free."""
    request = text_bytes(config, spec, dtype, config.max_model_len)
    if device.type != "cuda":
        return default_kv_memory(request, None)
    torch.cuda.empty_cache()  # of what packing weights took for a moment
    return default_kv_memory(request, torch.cuda.mem_get_info(device)[0])


def demoted_page_size(allowed: Sequence[EvictionPolicy], page_size: int, head_dim: int, dtype: torch.dtype) -> int:
    """Return the slots of a page of demoted tokens, 0 where none of the allowed policies demotes. Raises ValueError."""
    if not any(policy.modes.demote for policy in allowed):
        return 0
    slots = slots_in_page(page_size, head_dim, dtype, DEMOTED_DTYPE)
    if slots <= page_size:
        raise ValueError("demote=int4 saves no memory in a cache of 4 bits: use --kv-dtype int8, fp8 or bfloat16")
    return slots


def build_offload(
    config: Config,
    prefix_config: PrefixConfig,
    tier_configs: Sequence[tiers.Tier],
    cache: KVCacheManager,
    model: LoadedModel,
    ranks: RankGroup | None,
) -> Offloader:
    """Open the tiers below a cache of a model. Raises ValueError or OSError."""
    if ranks and isinstance(prefix_config, SelectiveConfig):
        raise ValueError("prefix_cache=selective chooses tokens by some heads: it does not go with tensor_parallel")
    kv = cache.kv
    path = model.path
    shape = cache.spec
    dtype = config.dtype if config.kv_dtype == "auto" else f"{config.dtype}, kv {config.kv_dtype}"
    if config.prompt_activations != "int8":
        dtype += f", activations of prompts {config.prompt_activations}"
    if cache.config.has_sketches:
        dtype += ", with sketches and keys by slot"  # as the cpu backend has them
    own = (ranks.rank, ranks.size) if ranks else ()
    format = (config.weights, dtype, CACHED_KEYS, kv.layout, kv.page_size, shape, model.rope_fingerprint, *own)
    # Another processor, GPU or version of this package computes keys and values with other last bits.
    gpu = torch.cuda.get_device_name(kv.device) if kv.device.type == "cuda" else ""
    machine = cache.backend.__name__, torch.backends.cpu.get_cpu_capability() + gpu, version("retain")
    fingerprint = xxh3_128(repr((format, isinstance(prefix_config, SelectiveConfig), machine)).encode())
    if any(not isinstance(t, ram.Tier) for t in tier_configs):  # outlives the process, so the weights count too
        heads = list_model_files(model.head_path) if model.head_path else []  # whose layer is stored, too
        for file in [*list_model_files(path), *heads]:
            with file.open("rb") as f:
                while block := f.read(2**24):
                    fingerprint.update(block)
    shown = {"model": path.name, "weights": config.weights, "dtype": dtype, "page_size": kv.page_size}
    shown |= {"machine and version": " ".join(machine)}
    return open_offload_tiers(prefix_config, tier_configs, cache, model.spec, fingerprint.digest(), shown)


def open_offload_tiers(
    prefix_config: PrefixConfig,
    tier_configs: Sequence[tiers.Tier],
    cache: KVCacheManager,
    spec: ModelSpec,
    model_fingerprint: bytes,
    description: dict[str, Any] | None = None,
) -> Offloader:
    """Open tiers for a model of this fingerprint, `description` for people. Raises ValueError or OSError.

    The nearest tiers are searched first. With selective loading, a memory tier caches blocks that were read.
    """
    memory = [t for t in tier_configs if isinstance(t, ram.Tier)]
    probe_config = None
    block_cache = None
    if isinstance(prefix_config, SelectiveConfig):
        if len(spec.kv_cache.groups) > 1 or spec.kv_cache.has_shared_caches:
            raise ValueError(
                "prefix_cache=selective needs layers that cache alike, share nothing, and have no head: use exact"
            )
        heads = spec.kv_cache.only_group.num_kv_heads
        probe_config = ProbeConfig(prefix_config.ratio, spec.attention.scale, heads, cache.backend, cache.kv)
        block_cache = BlockCache(memory[0].capacity, memory[0].evict) if memory else None
        tier_configs = [t for t in tier_configs if t not in memory]
        if not tier_configs:
            raise ValueError("prefix_cache=selective loads from a tier: give --tier disk:path=DIR,capacity=SIZE")
    elif memory and memory[0].evict == "importance":
        raise ValueError("evict=importance goes by what is important: it is for prefix_cache=selective")
    pools = cache.pools
    layout = cache.block_layout
    parts = zip(layout.groups, pools, cache.spec.groups, strict=False)
    num_full = sum(g.num_layers for g in layout.groups)
    page_bytes = sum(
        (g.num_layers if num_full else len(group.caches))
        * g.num_kv_heads
        * g.pages_per_block
        * (kv.k[0].nbytes + kv.v[0].nbytes)
        for g, kv, group in parts
    )
    span_format = SpanFormat(model_fingerprint, description or {}, page_bytes)
    opened = sorted((t.open(span_format) for t in tier_configs), key=lambda s: s.distance)
    log.info("tiers: %s", ", ".join(s.name for s in opened))
    return Offloader(opened, pools, layout, model_fingerprint, probe_config, block_cache)
