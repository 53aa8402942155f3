"""Rotary position embeddings: rotation by position, and every config style that selects them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from retain.models.rope import Rope, get_rope, get_rope_parameters

D = 32
DEFAULT_PARAMETERS = {"rope_theta": 10000.0, "rope_type": "default"}


def random_tensor(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(2))


def apply_rope(r: Rope, x: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
    return r.apply(x, r.angles(pos, x.dtype))


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dim", [D, 8])
def test_dot_product_depends_on_the_distance_alone(dim: int, interleaved: bool) -> None:
    r, (q, k) = get_rope(dim, DEFAULT_PARAMETERS, interleaved), random_tensor(2, 1, 1, D)

    def dot(pos: int, distance: int) -> float:
        rotated_q, rotated_k = apply_rope(r, q, torch.tensor([pos + distance])), apply_rope(r, k, torch.tensor([pos]))
        return float((rotated_q * rotated_k).sum())

    assert dot(0, 7) == pytest.approx(dot(900, 7), abs=1e-2)
    assert dot(0, 7) != pytest.approx(dot(0, 8), abs=1e-1)


@pytest.mark.parametrize("interleaved", [False, True])
def test_rope_rotates_each_pair_and_leaves_the_rest(interleaved: bool) -> None:
    x, pos = random_tensor(3, 2, D), torch.tensor([0, 5, 100])
    r = get_rope(8, DEFAULT_PARAMETERS, interleaved)
    y = apply_rope(r, x, pos)
    assert torch.equal(y[0], x[0]) and torch.equal(y[..., 8:], x[..., 8:])
    for i, freq in enumerate(r.freqs):
        a, b = (2 * i, 2 * i + 1) if interleaved else (i, i + 4)
        z = torch.complex(x[..., a], x[..., b]) * torch.exp(1j * pos[:, None] * freq)
        torch.testing.assert_close(torch.complex(y[..., a], y[..., b]), z)


def test_bfloat16_angles_are_computed_in_float32() -> None:
    r, pos = get_rope(D, DEFAULT_PARAMETERS), torch.tensor([30001])
    exact, rounded = (r.angles(pos, dtype)[0] for dtype in (torch.float32, torch.bfloat16))
    assert rounded.dtype == torch.bfloat16
    torch.testing.assert_close(rounded.float(), exact, atol=4e-3, rtol=0)


SCALINGS: list[dict[str, Any]] = [
    {"rope_type": "default"},
    {"rope_type": "linear", "factor": 8.0},
    {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    | {"original_max_position_embeddings": 8192},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096},
    {"rope_type": "yarn", "factor": 4.0},  # the original context is then max_position_embeddings
    {"rope_type": "yarn", "factor": 40.0, "mscale": 1.0, "mscale_all_dim": 0.7},
    {"rope_type": "yarn", "factor": 4.0, "beta_fast": 16.0, "beta_slow": 2.0, "truncate": False},
    {"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.5},
    {"rope_type": "yarn", "factor": 0.5},
]


@pytest.mark.slow
@pytest.mark.parametrize("theta", [10000.0, 500000.0])
@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("style", ["rope_parameters", "rope_scaling", "rope_scaling, type"])
def test_frequencies_equal_transformers(style: str, scaling: dict[str, Any], theta: float) -> None:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config: dict[str, Any] = {"max_position_embeddings": 32768}
    if style == "rope_parameters":
        config["rope_parameters"] = {"rope_theta": theta, **scaling}
    else:
        renamed = {style[-4:] if k == "rope_type" and style.endswith("type") else k: v for k, v in scaling.items()}
        config |= {"rope_theta": theta, "rope_scaling": renamed}
    ours = get_rope(D, get_rope_parameters(config))
    theirs = LlamaRotaryEmbedding(LlamaConfig(**config, head_dim=D))
    torch.testing.assert_close(ours.freqs, theirs.inv_freq, rtol=1e-6, atol=0)
    assert ours.attention_factor == pytest.approx(theirs.attention_scaling)


def test_default_parameters_and_theta() -> None:
    assert DEFAULT_PARAMETERS.items() <= get_rope_parameters({}).items()
    config = {"rope_scaling": None, "rope_theta": None}
    assert get_rope_parameters(config, defaults={"rope_theta": 7.0})["rope_theta"] == 7.0


def test_missing_options_are_named() -> None:
    scaled = get_rope_parameters({"rope_scaling": {"type": "linear"}})
    with pytest.raises(ValueError, match=r"config\.json lacks 'factor'"):
        get_rope(D, scaled)


def test_unknown_rope_types_are_refused() -> None:
    with pytest.raises(ValueError, match="rope type 'longrope' is not supported: one of default, linear, llama3, yarn"):
        get_rope(D, {"rope_theta": 1e4, "rope_type": "longrope"})
