"""Rotary position embeddings of a config. Families differ in which elements of a head form a pair, and in how
frequencies are scaled for texts longer than those in training.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from retain.files import quote
from retain.kernels.rope import Rope
from retain.models.family_config import FamilyConfig, check_supported

ROPE_DEFAULTS: Mapping[str, Any] = {"rope_theta": 10000.0}
LONGROPE_TYPES = ("longrope", "su")  # the second name is of old files


def get_rope_parameters(
    config: Mapping[str, Any],
    theta_key: str = "rope_theta",
    share_key: str = "partial_rotary_factor",
    defaults: Mapping[str, Any] = ROPE_DEFAULTS,
) -> FamilyConfig:
    """Return a config's RoPE parameters: `rope_theta`, `rope_type` and the options of that type.

    Reads both styles as transformers does. `rope_scaling` is the older one, whose type may be named `type`, with two
    parameters beside it in the config (named by the keys). It replaces `rope_parameters`, the style of transformers 5.
    """
    given = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if nested := [key for key, value in given.items() if isinstance(value, Mapping)]:
        raise ValueError(f"rope parameters for {quote(nested[0])} alone are not supported in this family")
    beside = {"rope_theta": config.get(theta_key), "partial_rotary_factor": config.get(share_key)}
    beside = {key: value for key, value in beside.items() if value is not None}
    return complete_rope_parameters({**defaults, **beside, **given}, config)


def complete_rope_parameters(params: Mapping[str, Any], config: Mapping[str, Any]) -> FamilyConfig:
    """Return RoPE parameters with `rope_type` and the original context, which are often left to a default."""
    original = "original_max_position_embeddings"
    context = config.get(original) or params.get(original) or config.get("max_position_embeddings")
    rope_type = params.get("rope_type") or params.get("type") or "default"
    return FamilyConfig({**params, "rope_type": rope_type, original: context})


def get_rope(dim: int, params: Mapping[str, Any], interleaved: bool = False) -> Rope:
    """Return the Rope of the first `dim` elements of a head (see get_rope_parameters).

    Raises ValueError for an unknown `rope_type`, or where an option of it is missing.
    """
    theta = params["rope_theta"]
    rope_type = params["rope_type"]
    freqs = 1.0 / theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)  # [n/2]
    if rope_type == "default":
        return Rope(freqs, interleaved)
    if rope_type == "linear":
        return Rope(freqs / params["factor"], interleaved)
    if rope_type == "proportional":  # of all pairs, the first share turns as in whole heads, and the rest never does
        is_rotated = torch.arange(dim // 2) < int(get_rotated_share(params) * dim // 2)
        return Rope(torch.where(is_rotated, freqs / params.get("factor", 1.0), 0.0), interleaved)
    if rope_type == "llama3":
        return Rope(_llama3_freqs(freqs, params), interleaved)
    if rope_type == "yarn":
        return Rope(_yarn_freqs(freqs, dim, params), interleaved, _yarn_attention_factor(params))
    known = "default, linear, llama3, yarn, proportional"
    raise ValueError(f"rope type {quote(rope_type)} is not supported: one of {known}")


def _llama3_freqs(freqs: Tensor, params: Mapping[str, Any]) -> Tensor:
    """Scale as Llama 3.1: divide low frequencies by the factor, keep high ones, blend those between."""
    turns = params["original_max_position_embeddings"] * freqs / (2 * math.pi)  # turns over the original context
    lo = params["low_freq_factor"]
    hi = params["high_freq_factor"]
    keep = ((turns - lo) / (hi - lo)).clamp(0, 1)
    return keep * freqs + (1 - keep) * freqs / params["factor"]


def _yarn_freqs(freqs: Tensor, dim: int, params: Mapping[str, Any]) -> Tensor:
    """Scale as YaRN (arXiv 2309.00071): a blend as in Llama 3, but linear in the dimension."""

    def dimension(turns: float) -> float:
        """Return the fractional dimension that makes `turns` turns over the original context."""
        wavelength = params["original_max_position_embeddings"] / (turns * 2 * math.pi)
        return dim * math.log(wavelength) / (2 * math.log(params["rope_theta"]))

    lo = dimension(params.get("beta_fast") or 32)
    hi = dimension(params.get("beta_slow") or 1)
    if params.get("truncate", True):
        lo = math.floor(lo)
        hi = math.ceil(hi)
    lo = max(lo, 0)
    hi = min(hi, dim - 1)
    ramp = ((torch.arange(len(freqs)) - lo) / (hi - lo if hi != lo else 1e-3)).clamp(0, 1)
    return (1 - ramp) * freqs + ramp * freqs / params["factor"]


def _yarn_attention_factor(params: Mapping[str, Any]) -> float:
    """Return YaRN's factor on cos and sin; its square sharpens the softmax over q.k."""
    factor = params["factor"]
    if params.get("attention_factor") is not None:
        return float(params["attention_factor"])
    m = params.get("mscale")
    all_dim = params.get("mscale_all_dim")
    return yarn_gain(factor, m) / yarn_gain(factor, all_dim) if m and all_dim else yarn_gain(factor)


def yarn_gain(factor: float, mscale: float = 1.0) -> float:
    """Return YaRN's gain for a context that is so many times as long; `mscale` is that of the config."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def get_whole_head_rope(
    head_dim: int,
    config: Mapping[str, Any],
    defaults: Mapping[str, Any] = ROPE_DEFAULTS,
    interleaved: bool = False,
    theta: float | None = None,
) -> Rope:
    """Return the Rope of a family that rotates whole heads. `theta` replaces the base of the config.

    As in transformers, such a family ignores `partial_rotary_factor`; but scaled types would use it. Raises ValueError.
    """
    params: Mapping[str, Any] = get_rope_parameters(config, defaults=defaults)
    if theta is not None:
        params = {**params, "rope_theta": theta}
    if params["rope_type"] != "default":
        check_supported(params, partial_rotary_factor=1.0)
    return get_rope(head_dim, params, interleaved)


def get_partial_rope(
    head_dim: int,
    config: Mapping[str, Any],
    defaults: Mapping[str, Any] = ROPE_DEFAULTS,
    interleaved: bool = False,
    context_limit: int | None = None,
) -> Rope:
    """Return the Rope of a family that rotates a share of each head, `partial_rotary_factor`. Raises ValueError.

    `context_limit`: that of the engine, which a family gives if its configs have frequencies for each kind of context
    (`longrope`).
    """
    params = get_rope_parameters(config, defaults=defaults)
    dim = int(head_dim * get_rotated_share(params))
    if context_limit is not None and (params["rope_type"] in LONGROPE_TYPES or "short_factor" in params):
        return get_longrope(dim, params, config["max_position_embeddings"], context_limit)
    return get_rope(dim, params, interleaved)


def get_longrope(dim: int, params: Mapping[str, Any], full_context: int, context_limit: int) -> Rope:
    """Return LongRoPE (arXiv 2402.13753): a factor for each frequency, from one of two lists.

    `long_factor` if the engine's context is longer than the original one, else `short_factor`. transformers chooses by
    the length of each text, so that the angles of cached keys would change under a text that grows; vLLM chooses as we
    do. `full_context`: that of the model, `max_position_embeddings`. Raises ValueError.
    """
    original = get_original_context(params)
    kind = "long" if context_limit > original else "short"
    factors = params[f"{kind}_factor"]
    if not (isinstance(factors, list) and len(factors) == dim // 2 and all(map(_is_positive, factors))):
        raise ValueError(f"{kind}_factor is {quote(factors)}, not a list of {dim // 2} numbers above 0")
    freqs = params["rope_theta"] ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)  # [n/2]
    attention_factor = params.get("attention_factor")
    if attention_factor is None:
        attention_factor = params.get(f"{kind}_mscale")
    if attention_factor is None:
        factor = params.get("factor") or full_context / original
        attention_factor = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    return Rope(1.0 / (torch.tensor(factors, dtype=torch.float32) * freqs), attention_factor=float(attention_factor))


def _is_positive(value: Any) -> bool:
    return type(value) in (int, float) and 0 < value < math.inf


def get_rotated_share(params: Mapping[str, Any]) -> float:
    """Return the share of each head that is rotated. Raises ValueError unless it is above 0, and at most 1."""
    share = params.get("partial_rotary_factor", 1.0)
    if type(share) not in (int, float) or not 0 < share <= 1:
        raise ValueError(f"partial_rotary_factor is {quote(share)}, not a number above 0 up to 1")
    return float(share)


def get_original_context(params: Mapping[str, Any]) -> int:
    """Return the context before scaling, in tokens. Raises ValueError unless it is a whole number above 0."""
    context = params["original_max_position_embeddings"]
    if type(context) is not int or context < 1:
        raise ValueError(f"original_max_position_embeddings is {quote(context)}, not a whole number above 0")
    return context
