"""Masses: the cpu backend leaves what `reference` leaves, and what that means."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
from scene import Scene, assert_close
from torch import Tensor

from retain.kernels import CONSTANT, GAUSSIAN, GUMBEL, KV, NO_NOISE, Observe, cpu, reference

BF16 = torch.bfloat16
needs_cpu = pytest.mark.skipif(cpu.available() is not None, reason=str(cpu.available()))


def observe(scene: Scene, kind: int, tau: float = 1.0, anew: int = 1, decay: float = 1.0) -> Observe:
    """Weights of all sizes, some 0; requests alike but for their seeds."""
    rng = torch.Generator().manual_seed(scene.seed + 3)
    T, B = sum(scene.fresh), len(scene.fresh)
    weights = torch.rand(T, generator=rng) * (torch.rand(T, generator=rng) < 0.8)
    same = torch.ones(B, dtype=torch.int32)
    return Observe(
        weights, torch.full((T,), tau), torch.full((B,), decay), same * kind, same.cumsum(0).int(), same * anew
    )


def step(scene: Scene, backend: ModuleType, asked: Observe | None, columns: int = 1) -> tuple[Tensor, KV]:
    """Output and pool of one step, layer 2."""
    q, q_pos = scene.queries()
    kv = scene.cache(backend, columns=columns)
    kv.mass.copy_(torch.rand(kv.mass.shape, generator=torch.Generator().manual_seed(scene.seed + 4)))
    H = q.shape[1]
    slopes = 2.0 ** (-8 * torch.arange(1, H + 1) / H) if scene.alibi else None
    return backend.attend(q, kv, scene.tables(), q_pos, scene.D**-0.5, slopes, asked, 2), kv


SCENES = {
    "one": Scene((1,), ((3, 2),), shared=False),
    "few, of long tables": Scene((1, 3, 0), ((40, 41), (5, 0), (2, 2)), shared=False),
    "chunk": Scene((70, 1), ((6, 7), (3, 3)), shared=False),
    "tiles": Scene((200,), ((20, 18),), S=16, R=4, shared=False),
    "scattered": Scene((30,), ((12, 9),), scattered=True, shared=False),
    "alibi": Scene((20, 1), ((6, 4), (33, 40)), alibi=True, shared=False),
    "bfloat16": Scene((20, 1), ((6, 4), (33, 40)), dtype=BF16, shared=False),
}
KINDS = {
    "h2o": (NO_NOISE, 1.0, 0, 1.0),
    "damped": (NO_NOISE, 1.0, 0, 0.75),
    "tempered": (NO_NOISE, 1.5, 0, 1.0),
    "keyformer": (GUMBEL, 1.25, 1, 1.0),
    "keyformer, noise drawn once": (GUMBEL, 2.0, 0, 1.0),
    "gaussian": (GAUSSIAN, 1.0, 1, 1.0),
    "constant": (CONSTANT, 1.5, 1, 1.0),
}


@needs_cpu
@pytest.mark.parametrize("columns", ["sum", "each"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", SCENES)
def test_masses_are_those_of_the_definition(isa: str, name: str, kind: str, columns: str) -> None:
    scene, C = SCENES[name], 1 if columns == "sum" else SCENES[name].R
    asked = observe(scene, *KINDS[kind])
    (want, slow), (got, fast) = step(scene, reference, asked, C), step(scene, cpu, asked, C)
    loose = 2**-7 if scene.dtype == BF16 else 1e-4
    assert_close(got, want, loose)
    assert_close(fast.mass, slow.mass, loose)
    assert torch.equal(got, step(scene, cpu, None)[0]), "observing changes what is attended to"
