"""The factory: builds the parts of an engine from a configuration. Does not depend on: text, requests."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from xxhash import xxh3_128

from retain import kernels, models
from retain.config import Config, default_kv_memory
from retain.engine.runner import ProgramRunner
from retain.formats.checkpoint import Checkpoint, list_model_files
from retain.gates.loader import GateLoader
from retain.kernels.api import CPU, Backend
from retain.kernels.kv_cache_spec import KVCacheSpec
from retain.kernels.pool_dtypes import slots_in_page
from retain.kv.capacity import CacheConfig, CapacityPlanner, refuse_gates
from retain.kv.eviction.demotion import DEMOTED_DTYPE
from retain.kv.eviction.gate_weights import GateWeights
from retain.kv.eviction.policy import EvictionPolicy
from retain.kv.eviction.view import KeyTransform
from retain.kv.manager import KVCacheManager
from retain.kv.memory.group_pages import divide_pages, first_attention_group, fold_states
from retain.kv.memory.page_store import PageStore
from retain.kv.memory.pool import PagePool
from retain.kv.prefix.config import PrefixConfig, SelectiveConfig
from retain.kv.stores import tiers
from retain.kv.stores.offloader import Offloader
from retain.kv.stores.selective.block_cache import BlockCache
from retain.kv.stores.selective.repack import ProbeConfig
from retain.kv.stores.span import SpanFormat
from retain.kv.stores.tiers import ram
from retain.models.decoder import Decoder, ModelSpec
from retain.models.weights import open_weights

log = logging.getLogger(__name__)

# What stored keys are. It is part of a store's fingerprint, so change it with them.
CACHED_KEYS = "less mean offset, balanced"


@dataclass(frozen=True)
class LoadedModel:
    """A model in memory. `key_transform` is of the keys in its cache; `rope_fingerprint` says how they rotate."""

    path: Path
    spec: ModelSpec
    weight_bytes: int  # of the program
    runner: ProgramRunner
    key_transform: KeyTransform
    rope_fingerprint: str = ""

    @property
    def cache_spec(self) -> KVCacheSpec:
        """What a cache needs to know of the model."""
        return self.spec.kv_cache

    def gate_loader(self, default_file: str = "") -> GateLoader:
        """Return what loads the gates of this model; `default_file` is of policies that name none."""
        return GateLoader(self.path, self.cache_spec, default_file)


def load_model(
    path: Path,
    backend: Backend,
    dtype: torch.dtype,
    weights: str,
    progress: bool = False,
    device: torch.device = CPU,
    context_limit: int | None = None,
    has_head: bool = True,
    checkpoint: Checkpoint | None = None,
) -> LoadedModel:
    """Load a model for a backend, as a program. Raises ValueError or OSError.

    `context_limit`: the longest text, by default the model's own; some models have other frequencies for long ones.
    Without `has_head` the program returns states in place of logits. `checkpoint`: that of `path` where it is open
    already.
    Where a program packs weights, nothing of the file outlives this call, unless the caller holds `checkpoint`: the
    cache may take the memory.
    """
    kernels.check_dtype(backend, dtype)
    program = backend.program(dtype, device)
    opened = open_weights(path, dtype, weights, progress, program.vector_dtype, context_limit, has_head, checkpoint)
    decoder = models.build(opened, program)
    log.info("loaded %s: %s, weights %s, on %s", path.name, type(decoder).__name__, weights, device)
    runner = ProgramRunner(program)
    ropes = [(rope.freqs.tolist(), rope.attention_factor) for rope in decoder.ropes]
    return LoadedModel(path, decoder.spec, program.weight_bytes, runner, build_key_transform(decoder), repr(ropes))


def build_key_transform(decoder: Decoder) -> KeyTransform:
    """Return how cached keys differ from those of a model whose layers are loaded."""
    rotate = decoder.ropes[0].shift if decoder.ropes else None
    return KeyTransform(rotate, decoder.key_factors)


def build_cache(
    spec: KVCacheSpec,
    config: CacheConfig,
    backend: Backend,
    dtype: torch.dtype,
    memory_bytes: int,
    *,
    prefix_config: PrefixConfig | None = None,
    key_transform: KeyTransform | None = None,
    load_gate: Callable[[str], GateWeights] = refuse_gates,
    device: torch.device = CPU,
) -> KVCacheManager:
    """Build a cache of at most `memory_bytes`, and no more than all rows could ever use."""
    demoted_dtype = DEMOTED_DTYPE if config.demoted_page_size else None
    spec = fold_states(spec, config.page_size, dtype)
    pages = divide_pages(spec, config.page_size, dtype, config.score_columns, demoted_dtype)
    planner = CapacityPlanner(spec, config, load_gate, pages=pages)
    size = pages.page_bytes
    most = config.max_running_requests * planner.max_pages
    pool = PagePool(1 + min(max(memory_bytes // size - 1, 0), most))  # the trash page counts too
    f = pages.formats[first_attention_group(spec)]
    kv = backend.allocate(
        pool.num_pages, f.page_size, f.k_dim, f.dtype, f.score_columns, device, f.v_dim, pages.key_and_value_bytes
    )
    slots = ", ".join(str(f.page_size) for f in pages.formats)
    log.info("KV pool: %d pages of %s slots, %.1f MiB", pool.num_pages, slots, pool.num_pages * size / 2**20)
    if any(pages.unused_bytes):
        log.info("KV pool: bytes of a page that slots of each group leave unused: %s", pages.unused_bytes)
    return KVCacheManager(planner, PageStore(pool, kv, backend, size), prefix_config, key_transform)


def text_bytes(config: CacheConfig, spec: ModelSpec, dtype: torch.dtype, num_tokens: int) -> int:
    """Return the bytes of the pages that keep a text whole."""
    layers = fold_states(spec.kv_cache, config.page_size, dtype)
    pages = divide_pages(layers, config.page_size, dtype, config.score_columns)
    return CapacityPlanner(layers, config, pages=pages).pages_of_text(num_tokens) * pages.page_bytes


def default_pool_bytes(config: CacheConfig, spec: ModelSpec, dtype: torch.dtype, device: torch.device) -> int:
    """Return the bytes of a pool by what the machine has free."""
    request = text_bytes(config, spec, dtype, config.max_model_len)
    if device.type != "cuda":
        return default_kv_memory(request, None)
    torch.cuda.empty_cache()  # of what packing weights took for a moment
    return default_kv_memory(request, torch.cuda.mem_get_info(device)[0])


def demoted_page_size(policies: Sequence[EvictionPolicy], page_size: int, head_dim: int, dtype: torch.dtype) -> int:
    """Return the slots of a page of demoted tokens, 0 where none of the policies demotes. Raises ValueError."""
    if not any(policy.modes.demote for policy in policies):
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
) -> Offloader:
    """Open the tiers below a cache of a model. Raises ValueError or OSError."""
    kv = cache.kv
    path = model.path
    shape = cache.spec
    dtype = config.dtype if config.kv_dtype == "auto" else f"{config.dtype}, kv {config.kv_dtype}"
    if config.prompt_activations != "int8":
        dtype += f", activations of prompts {config.prompt_activations}"
    format = (config.weights, dtype, CACHED_KEYS, kv.layout, kv.page_size, shape, model.rope_fingerprint)
    # Another processor, GPU or version of this package computes keys and values with other last bits.
    gpu = torch.cuda.get_device_name(kv.device) if kv.device.type == "cuda" else ""
    machine = cache.backend.__name__, torch.backends.cpu.get_cpu_capability() + gpu, version("retain")
    fingerprint = xxh3_128(repr((format, isinstance(prefix_config, SelectiveConfig), machine)).encode())
    if any(not isinstance(t, ram.Tier) for t in tier_configs):  # outlives the process, so the weights count too
        for file in list_model_files(path):
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
            raise ValueError("prefix_cache=selective needs layers that cache alike, and share nothing: use exact")
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
        (g.num_layers if num_full else len(group.layers))
        * g.num_kv_heads
        * g.pages_per_block
        * (kv.k[0].nbytes + kv.v[0].nbytes)
        for g, kv, group in parts
    )
    span_format = SpanFormat(model_fingerprint, description or {}, page_bytes)
    opened = sorted((t.open(span_format) for t in tier_configs), key=lambda s: s.distance)
    log.info("tiers: %s", ", ".join(s.name for s in opened))
    return Offloader(opened, pools, layout, model_fingerprint, probe_config, block_cache)
