"""Marks of parameters."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def slow(*values: Any) -> list[Any]:
    """Return parameters that `make check` leaves out."""
    return [pytest.param(value, marks=pytest.mark.slow) for value in values]


def every_third(values: Iterable[Any]) -> list[Any]:
    """Return parameters of which `make check` runs the first of each three."""
    return [pytest.param(value, marks=[pytest.mark.slow] * (i % 3 > 0)) for i, value in enumerate(values)]
