"""A program is the decoder that emitted it: every family and variant, every instruction set, however tokens arrive."""

from __future__ import annotations

from types import ModuleType

import numpy as np
import pytest
import torch
from tests.models.test_families import CASES, Changes
from torch import Tensor

from retain import kernels, models
from retain.engine.batch import Batch
from retain.engine.runner import ProgramRunner, Runner, TorchRunner
from retain.kernels import cpu, reference, triton
from retain.kernels.api import CPU
from retain.kv.capacity import KVCacheSpec
from retain.kv.eviction import policies
from retain.kv.memory.cache import Cache
from retain.models.decoder import ModelSpec
from retain.models.weights import Weights
from tests.helpers.tiny_models import TinyCheckpoint, tiny_checkpoint

pytestmark = pytest.mark.skipif(cpu.unavailable_reason() is not None, reason=str(cpu.unavailable_reason()))
STEPS = [(20, 3), (1, 10), (0, 9), (18, 1), (1, 0)]  # fresh tokens of two requests


def make_cache(spec: ModelSpec, backend: ModuleType, dtype: torch.dtype, device: torch.device = CPU) -> Cache:
    shape = KVCacheSpec(spec.num_kv_heads, spec.head_dim, spec.windows)
    return Cache(shape, backend, dtype, 2**24, 16, 2, 64, 32, device=device)


def run_steps(runner: Runner, cache: Cache, vocab: int, steps: list[tuple[int, ...]]) -> Tensor:
    """Those of every token, step by step, [tokens, V]."""
    rows = [cache.open(policies.parse("full"), 32) for _ in range(2)]
    texts = torch.randint(0, vocab, (2, 64), generator=torch.Generator().manual_seed(5))
    done, found = [0, 0], []
    for counts in steps:
        chosen = [b for b in range(2) if counts[b]]
        pos = np.concatenate([np.arange(done[b], done[b] + counts[b], dtype=np.int32) for b in chosen])
        ids = torch.cat([texts[b, done[b] : done[b] + counts[b]] for b in chosen])
        for b in chosen:
            done[b] += counts[b]
            assert cache.reserve(rows[b], done[b])
        own = np.array([rows[b] for b in chosen], np.int32)
        n = np.array([counts[b] for b in chosen], np.int32)
        slots = cache.compute_slot_mapping(np.repeat(own, n), pos)
        starts = torch.tensor([0, *n.cumsum()], dtype=torch.int32)
        wanted = torch.arange(len(ids))
        batch = Batch(ids, torch.from_numpy(pos), torch.from_numpy(own), starts, slots, wanted, [])
        found.append(runner.forward(batch).cpu().clone())
    return torch.cat(found)


def logits_of_program(
    checkpoint: TinyCheckpoint,
    steps: list[tuple[int, ...]],
    quantization: str = "auto",
    dtype: torch.dtype = torch.float32,
    backend: ModuleType = cpu,
) -> Tensor:
    there = torch.device("cuda") if backend is triton and not triton.is_interpreted() else CPU
    program = backend.program(torch.float32, there)
    spec = models.build(Weights(checkpoint, dtype, quantization, vector_dtype=torch.float32), program).spec
    room = make_cache(spec, backend, dtype, there)
    return run_steps(ProgramRunner(program, room), room, spec.vocab_size, steps)


def logits_of_reference(checkpoint: TinyCheckpoint, steps: list[tuple[int, ...]]) -> Tensor:
    model = models.build(Weights(checkpoint, torch.float32))
    room = make_cache(model.spec, reference, torch.float32)
    return run_steps(TorchRunner(model, reference, room), room, model.spec.vocab_size, steps)


def assert_close(got: Tensor, want: Tensor, tolerance: float) -> None:
    far, top = (got - want).abs().max().item(), want.abs().max().item()
    assert far <= tolerance * top, f"off by {far:.2e} where the largest is {top:.2e}"


@pytest.mark.parametrize(("family", "changes"), CASES, ids=["+".join([f, *c]) for f, c in CASES])
def test_the_program_is_the_decoder(family: str, changes: Changes) -> None:
    source = tiny_checkpoint(family, **changes)
    assert_close(logits_of_program(source, STEPS), logits_of_reference(source, STEPS), 2e-5)


@pytest.mark.skipif(triton.unavailable_reason() is not None, reason=str(triton.unavailable_reason()))
@pytest.mark.parametrize("family", models.list_families())
def test_the_program_of_triton_is_the_decoder(family: str) -> None:
    """Some tokens at once, then one of each, twice: what is recorded comes in the third step."""
    source, steps = tiny_checkpoint(family), [(5, 3), (1, 1), (1, 1)]
    assert_close(logits_of_program(source, steps, backend=triton), logits_of_reference(source, steps), 2e-5)


@pytest.mark.parametrize("family", models.list_families())
def test_on_every_instruction_set(isa: str, family: str) -> None:
    source = tiny_checkpoint(family)
    assert_close(logits_of_program(source, STEPS), logits_of_reference(source, STEPS), 2e-5)


@pytest.mark.parametrize("weights", ["bf16", "int8", "int4"])
@pytest.mark.parametrize("family", models.list_families())
def test_chunks_and_company_change_no_bit(isa: str, family: str, weights: str) -> None:
    """Not in any kind of weights: integers are summed exactly, and floats in the order of the inputs."""
    source = tiny_checkpoint(family)
    together = logits_of_program(source, [(9, 12)], weights, torch.bfloat16)
    apart = logits_of_program(source, [(9, 0), *[(0, 1)] * 12], weights, torch.bfloat16)
    assert torch.equal(together, apart)


@pytest.mark.parametrize("family", models.list_families())
def test_less_exact_weights_are_close(family: str) -> None:
    source = tiny_checkpoint(family)
    want = logits_of_reference(source, STEPS)
    for weights in ("bf16", "int8"):
        got = logits_of_program(source, STEPS, weights, torch.bfloat16)
        assert (got - want).norm() <= 0.15 * want.norm()  # tiny random models magnify what is rounded


def test_shapes_that_do_not_fit_are_refused() -> None:
    source = tiny_checkpoint("llama")
    source.shapes["model.layers.1.mlp.down_proj.weight"] = (64, 97)
    with pytest.raises(ValueError, match=r"do not fit|are wanted"):
        models.build(Weights(source, torch.float32), kernels.load("cpu").program(torch.float32, CPU))
