"""Making a family that lives in tests only known to a test."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

from retain import models
from tests.helpers import tiny_models


def add_family(
    monkeypatch: pytest.MonkeyPatch,
    model_type: str,
    family: ModuleType,
    config: dict[str, Any],
    shapes: Callable[[dict[str, Any]], tiny_models.Shapes],
) -> None:
    """Let models of this type be built by `family`, and tiny checkpoints of it have these tensors."""
    load_family = models.load_family
    monkeypatch.setattr(models, "load_family", lambda name: family if name == model_type else load_family(name))
    monkeypatch.setitem(tiny_models.CONFIGS, model_type, config)
    monkeypatch.setitem(tiny_models.TENSOR_SHAPES, model_type, shapes)
