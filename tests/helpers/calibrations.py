"""Calibrations of simulated replicas, with round numbers."""

from __future__ import annotations

from typing import Any

from retain.bench.simulation.calibration import Calibration, StepWork

SECONDS = StepWork(steps=0.01, prompt_tokens=0.002, prompt_slots=1e-6, decode_rows=0.001, decode_slots=1e-5)


def make_calibration(**changes: Any) -> Calibration:
    """A replica of 200 pages of 16 tokens that computes 500 prompt tokens a second."""
    values: dict[str, Any] = {
        "seconds": SECONDS,
        "page_size": 16,
        "page_bytes": 10_000,
        "num_pages": 200,
        "max_running_requests": 8,
        "max_batched_tokens": 64,
        "max_model_len": 512,
        "vocab_size": 1000,
        "options": {},
        "machine": "",
        "num_threads": 1,
        "num_steps": 0,
        "median_error": 0.0,
    }
    return Calibration(**(values | changes))
