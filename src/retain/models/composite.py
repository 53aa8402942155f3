"""Families with vision or audio, of which the text is computed: the config has that of a text model inside."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from retain.models.decoder import Decoder, ModelSpec
from retain.models.family_config import FamilyConfig
from retain.models.weights import Weights


def text_model(
    family: ModuleType, is_tied: bool
) -> tuple[Callable[[Mapping[str, Any]], ModelSpec], Callable[[Weights], Decoder]]:
    """Return the `spec_from_config` and the `build` of a family whose text model is one of another family.

    Whether head and embedding are tied stands beside the text model's config, or is `is_tied`.
    """

    def get_text_config(c: Mapping[str, Any]) -> FamilyConfig:
        tied = {"tie_word_embeddings": c.get("tie_word_embeddings", is_tied)}
        return FamilyConfig({**FamilyConfig(c)["text_config"], **tied})

    def spec_from_config(c: Mapping[str, Any]) -> ModelSpec:
        return family.spec_from_config(get_text_config(c))

    def build(w: Weights) -> Decoder:
        return family.build(w.with_config(get_text_config(w.config)))

    return spec_from_config, build
