"""Rooms that are built from a config: a model with its runner, a cache. What is not known here: text, requests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path
from types import ModuleType

import torch
from xxhash import xxh3_128

from retain import models
from retain.config import Config
from retain.engine.runner import ProgramRunner, Runner, TorchRunner
from retain.kernels.api import CPU
from retain.kv.capacity import KVCacheSpec
from retain.kv.eviction.operations import ShiftKeys
from retain.kv.memory.cache import Cache
from retain.kv.offload import tiers
from retain.kv.offload.manager import Offloader
from retain.kv.offload.selective.repack import ProbeConfig
from retain.kv.offload.selective.row_cache import BlockCache
from retain.kv.offload.tiers import disk, ram
from retain.kv.prefix.cache import PrefixConfig, SelectiveConfig
from retain.models.decoder import ModelSpec
from retain.models.weights import open_weights


def load_model(
    path: Path, backend: ModuleType, dtype: torch.dtype, weights: str, progress: bool, device: torch.device = CPU
) -> tuple[ModelSpec, int, Callable[[Cache], Runner], ShiftKeys | None]:
    """A model's spec, the bytes of its packed weights (0 where torch computes), its runner, given a cache, and what
    moves its keys, if they are turned.

    Where a program computes, nothing of the file outlives this call: room for the cache comes after.
    """
    program = backend.program(dtype, device)
    # torch wants a bias or a norm of its input's dtype; a program keeps rows in float32.
    vectors = torch.float32 if program else None
    decoder = models.build(open_weights(path, dtype, weights, progress, vectors), program)
    turn = decoder.ropes[0].shift if decoder.ropes else None
    if program:
        return decoder.spec, program.weight_bytes, partial(ProgramRunner, program), turn
    return decoder.spec, 0, partial(TorchRunner, decoder, backend), turn


def build_cache(
    config: Config,
    spec: ModelSpec,
    backend: ModuleType,
    memory_bytes: int,
    max_model_len: int,
    score_columns: int = 1,
    shift_keys: ShiftKeys | None = None,
    prefix_config: PrefixConfig | None = None,
    device: torch.device = CPU,
) -> Cache:
    """For a model of this spec, of so many bytes, for texts of at most `context` tokens."""
    shape, dtype = KVCacheSpec(spec.num_kv_heads, spec.head_dim, spec.windows), getattr(torch, config.dtype)
    return Cache(
        *(
            shape,
            backend,
            dtype,
            memory_bytes,
            config.page_size,
            config.max_running_requests,
            max_model_len,
            config.max_batched_tokens,
            score_columns,
            shift_keys,
            prefix_config,
        ),
        device,
    )


def build_offload(
    config: Config,
    prefix_config: PrefixConfig,
    tier_configs: Sequence[tiers.Tier],
    cache: Cache,
    spec: ModelSpec,
    path: Path,
) -> Offloader:
    """The tiers below a cache of the model at `path`. Raises ValueError or OSError."""
    kv, shape = cache.kv, cache.spec
    made = (config.weights, config.dtype, kv.layout, kv.page_size, shape.kv_heads, shape.head_dim, shape.windows)
    # What computes decides the last bits: another processor, or another version of us, has other keys and values.
    gpu = torch.cuda.get_device_name(kv.device) if kv.device.type == "cuda" else ""
    who = cache.backend.__name__, torch.backends.cpu.get_cpu_capability() + gpu, version("retain")
    brand = xxh3_128(repr((made, isinstance(prefix_config, SelectiveConfig), who)).encode())
    if any(isinstance(t, disk.Tier) for t in tier_configs):  # outlives the process: other weights have others too
        for file in [*sorted(path.glob("*.safetensors")), path / "config.json"] if path.is_dir() else [path]:
            with file.open("rb") as f:
                while block := f.read(2**24):
                    brand.update(block)
    return open_offload_tiers(prefix_config, tier_configs, cache, spec, brand.digest())


def open_offload_tiers(
    prefix_config: PrefixConfig,
    tier_configs: Sequence[tiers.Tier],
    cache: Cache,
    spec: ModelSpec,
    model_fingerprint: bytes,
) -> Offloader:
    """The same of a brand that is known. Memory is asked before disks; where only what is important is loaded, it keeps
    what was read.
    """
    memory, probes, hot = [t for t in tier_configs if isinstance(t, ram.Tier)], None, None
    if isinstance(prefix_config, SelectiveConfig):
        probes = ProbeConfig(prefix_config.ratio, spec.scale, spec.num_kv_heads, cache.backend)
        hot = BlockCache(memory[0].capacity, memory[0].evict) if memory else None
        tier_configs = [t for t in tier_configs if t not in memory]
        if not tier_configs:
            raise ValueError("--prefix-cache selective loads from a disk: give --tier disk:path=DIR,capacity=SIZE")
    elif memory and memory[0].evict == "worth":
        raise ValueError("evict=worth goes by what is important: it is for --prefix-cache selective")
    opened = sorted((t.open() for t in tier_configs), key=lambda s: s.write_through)
    return Offloader(opened, cache.kv, spec.num_kv_heads, model_fingerprint, probes, hot)
