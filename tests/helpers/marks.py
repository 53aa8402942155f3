"""Marks of parameters."""

from __future__ import annotations

from typing import Any

import pytest


def slow(*values: Any) -> list[Any]:
    """Return parameters that `make check` leaves out."""
    return [pytest.param(value, marks=pytest.mark.slow) for value in values]
