"""A family that lives in tests only: Llama's with a softcap, sink logits, biases and sliding layers.

Its model type is "sinks". The fixture makes it known to a test.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import pytest

from retain.kernels.attention_params import AttentionParams
from retain.models import llama_like
from retain.models.decoder import Decoder, DecoderLayer, ModelSpec
from retain.models.families import llama
from retain.models.family_config import add_defaults
from retain.models.weights import Weights
from tests.helpers import tiny_models
from tests.helpers.extra_family import add_family

SINKS = "sinks"


def spec_from_config(c: Mapping[str, Any]) -> ModelSpec:
    """Read the spec from config.json."""
    c = add_defaults(c, llama.DEFAULTS)
    windows = tuple(c["sliding_window"] if i % 2 else None for i in range(c["num_hidden_layers"]))
    spec = llama_like.make_spec(c, windows)
    return replace(spec, attention=AttentionParams(spec.attention.scale, softcap=c["attn_logit_softcapping"]))


def build(w: Weights) -> Decoder:
    """Build the decoder. Each layer has sink logits of its own."""
    w = w.with_defaults(llama.DEFAULTS)
    spec = spec_from_config(w.config)
    decoder = llama_like.build_decoder(w, spec, llama_like.OptionalTensors(qkv_bias=True))

    def load_layer(i: int) -> DecoderLayer:
        layer: Any = decoder.load_layer(i)
        params = replace(spec.attention, sink_logits=w[f"model.layers.{i}.self_attn.sinks"].float())
        return replace(layer, attention=replace(layer.attention, own_params=params))

    return replace(decoder, load_layer=load_layer)


CONFIG = {**tiny_models.LLAMA, "sliding_window": 16, "attn_logit_softcapping": 3.0}


def shapes(c: dict[str, Any]) -> tiny_models.Shapes:
    yield from tiny_models.llama_shapes({**c, "model_type": "qwen2"})  # with biases of q, k and v
    for i in range(c["num_hidden_layers"]):
        yield f"model.layers.{i}.self_attn.sinks", (c["num_attention_heads"],)


@pytest.fixture
def sink_family(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Make the family known to a test; gives its model type."""
    add_sink_family(monkeypatch)
    yield SINKS


def add_sink_family(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the family known."""
    add_family(monkeypatch, SINKS, sys.modules[__name__], CONFIG, shapes)
